"""How results leave a benchmark: a table on stdout, a JSON file and a plot, all with the machine they come from."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.measurements import Row

PACKAGES = ("torch", "numpy", "tokenizers", "grpcio", "onnxruntime", "openvino", "sentence-transformers")


def publish(name: str, rows: Sequence[Row], folder: Path, **about: object) -> None:
    """Print `rows`, and write them to `folder`/`name`.json and .png."""
    machine = describe_machine()
    print(f"# {name}: {', '.join(f'{key} {value}' for key, value in about.items())}")
    print(f"# {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, load {machine['load']}")
    print("\n".join(table(rows)), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "benchmark": name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "machine": machine,
        **about,
        "rows": [row._asdict() for row in rows],
    }
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    draw(rows, name, folder / f"{name}.png")


def table(rows: Iterable[Row]) -> Iterable[str]:
    """Aligned lines with a head."""
    head = ("workload", "subject", "median", "quartiles", "unit", "ratio", "to")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    for line in cells:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    spread = f"{_short(row.low)} to {_short(row.high)}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return row.workload, row.subject, _short(row.value), spread, row.unit, ratio, row.base


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def describe_machine() -> dict[str, Any]:
    """CPU, cores that this process may use, memory, load, and versions."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """Horizontal bars with their quartiles, one plot for each workload and unit."""
    panels = list(dict.fromkeys((row.workload, row.unit) for row in rows))
    figure = Figure(figsize=(8, 1 + 0.3 * len(rows) + 0.6 * len(panels)), layout="constrained")
    bars = [[row for row in rows if (row.workload, row.unit) == panel] for panel in panels]
    heights = [len(some) for some in bars]
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (workload, unit), some, ax in zip(panels, bars, axes, strict=True):
        values = np.array([row.value for row in some])
        errors = np.array([[row.value - row.low for row in some], [row.high - row.value for row in some]])
        ax.barh([row.subject for row in some], values, xerr=np.maximum(errors, 0), capsize=2)
        ax.invert_yaxis()
        ax.set(title=workload, xlabel=unit)
    figure.suptitle(title)
    figure.savefig(file, format="png")
