"""Ours against sentence-transformers, onnxruntime, OpenVINO and infinity: the same texts, in turns, offline.

    make bench-peers        # once
    python -m benchmarks.compare [--model bert-base] [--workloads QP] [--subjects ours openvino]

Every subject is a process of its own with as many threads as cores, pinned to the same cores, loaded beforehand; only
one of them works at a time. All go from text to vector, and the vectors must agree. Peers that are not installed in
.venv-peers are left out.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurements import Measurements
from benchmarks.options import Options, Texts, parser
from benchmarks.results import publish

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
OURS = "ours"
NEEDS = {
    OURS: "",
    "sentence-transformers": "sentence_transformers",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "infinity": "infinity_emb",
}
DTYPES = {  # of those that do not have all
    "sentence-transformers": ("float32", "bfloat16"),
    "onnxruntime": ("float32",),
    "openvino": ("float32", "bfloat16"),
    "infinity": ("float32",),
}
ALIKE = {"float32": 0.9999, "bfloat16": 0.99, "int8": 0.97}  # smallest cosine to our float32 vectors


class Subject:
    """A process that turns texts into vectors."""

    def __init__(self, name: str, dtype: str, folder: Path, texts: Path) -> None:
        self.name = f"{name} {dtype}"
        self.dtype = dtype
        self.base = f"fastest peer {dtype}" if name == OURS else ""
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        self._log = texts.with_name(f"{self.name}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [_python(name), str(ROOT / "benchmarks" / "peers.py"), name, dtype, str(folder), str(texts), cores],
                env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._read()

    def seconds(self, workload: str, *, cpu_time: bool) -> float:
        """How long it takes for all texts of the workload."""
        self._order(workload=workload)
        answer = self._read()
        return float(answer["cpu" if cpu_time else "wall"])

    def vectors(self, workload: str, file: Path) -> np.ndarray:
        """The vectors of all texts of the workload."""
        self._order(workload=workload, save=str(file))
        self._read()
        self._read()
        found: np.ndarray = np.load(file)
        return found

    def close(self) -> None:
        """Close its stdin, which ends it."""
        self._process.communicate()

    def _order(self, **order: str) -> None:
        print(json.dumps(order), file=self._process.stdin, flush=True)

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit(f"{self.name} ended: {self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _python(name: str) -> str:
    return sys.executable if name == OURS else str(PEERS)


def installed(name: str) -> bool:
    """Whether the subject can run."""
    if not NEEDS[name]:
        return True
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({NEEDS[name]!r}) is None)"
    return PEERS.is_file() and subprocess.run([str(PEERS), "-c", find], check=False).returncode == 0


@contextmanager
def started(options: Options, names: Sequence[str], workloads: dict[str, Texts]) -> Iterator[list[Subject]]:
    """All subjects in all dtypes that they have."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        texts = scratch / "texts.json"
        texts.write_text(json.dumps({name: list(some.texts) for name, some in workloads.items()}))
        subjects = []
        for dtype in options.dtypes:
            for name in names:
                if dtype in DTYPES.get(name, (dtype,)):
                    subjects.append(Subject(name, dtype, options.folder, texts))
                    stack.callback(subjects[-1].close)
        check(subjects, list(workloads), scratch / "vectors.npy")
        yield subjects


def check(subjects: Sequence[Subject], workloads: Sequence[str], file: Path) -> None:
    """Every subject computes the vectors of the first one. It also warms all of them up. Raises SystemExit."""
    for workload in workloads:
        expected = subjects[0].vectors(workload, file)
        for subject in subjects[1:]:
            cosine = float((subject.vectors(workload, file) * expected).sum(1).min())
            if cosine < ALIKE.get(subject.dtype, 0.99):
                raise SystemExit(f"{subject.name} computes something else on {workload}: smallest cosine {cosine:.4f}")


def measure(options: Options, names: Sequence[str]) -> Measurements:
    """All rounds. `fastest peer` is, in each round, whichever was fastest in it."""
    workloads, found = options.workloads(), Measurements("texts/s")
    with started(options, names, workloads) as subjects:
        for _ in range(options.rounds):
            for workload, some in workloads.items():
                rates = {s: len(some) / s.seconds(workload, cpu_time=options.cpu_time) for s in subjects}
                for subject, rate in rates.items():
                    found.add(workload, subject.name, rate, subject.base)
                for dtype in options.dtypes:
                    if peers := [rate for s, rate in rates.items() if s.base == "" and s.dtype == dtype]:
                        found.add(workload, f"fastest peer {dtype}", max(peers))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and publish."""
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("--subjects", nargs="+", choices=list(NEEDS), default=list(NEEDS))
    given = arguments_parser.parse_args(arguments)
    options, names = Options(given), [name for name in given.subjects if installed(name)]
    for name in set(given.subjects) - set(names):
        print(f"{name} is not installed in .venv-peers: left out", file=sys.stderr)
    publish("compare", list(measure(options, names).rows()), options.output, **options.about)


if __name__ == "__main__":
    main()
