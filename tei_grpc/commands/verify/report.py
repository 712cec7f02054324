"""What a comparison looks like: a table, a JSON object, a histogram."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tei_grpc.commands.verify.answers import Answers, Question
from tei_grpc.commands.verify.comparison import Comparison
from tei_grpc.errors import StartupError

ABOUT = ("path", "pooling", "modules", "longest input")
FLOOR = 1e-12  # smaller differences, and none, share the first bar


class Row(NamedTuple):
    """A line of the table."""

    name: str
    ours: str
    reference: str = ""


@dataclass(frozen=True)
class Report:
    """A comparison with what was compared."""

    model: str
    question: Question
    ours: Answers
    expected: Answers
    comparison: Comparison

    def as_table(self) -> str:
        """Ours and the reference side by side, then the measures with their bounds, then PASS or FAIL."""
        rows = [Row("", "ours", "reference"), *self._about(), *self._measures()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{row.name:{widths[0]}}  {row.ours:{widths[1]}}  {row.reference}".rstrip() for row in rows]
        failures = self.comparison.failures
        return "\n".join([*lines, f"FAIL: {', '.join(failures)}" if failures else "PASS"])

    def as_json(self) -> str:
        """One object on one line."""
        return json.dumps(self.as_dict(), ensure_ascii=False)

    def as_dict(self) -> dict[str, Any]:
        """The measures by name."""
        found = self.comparison
        return {
            "model": self.model,
            "task": self.question.task,
            "texts": found.texts,
            "ours": {"dtype": self.ours.dtype, **self.ours.about},
            "reference": {"dtype": self.expected.dtype, **self.expected.about},
            "equal_token_ids": found.equal_token_ids,
            "max_difference": float(found.differences.max()),
            "max_difference_allowed": found.allowed,
            "cosine_min": None if found.cosines is None else float(found.cosines.min()),
            "cosine_mean": None if found.cosines is None else float(found.cosines.mean()),
            "cosine_allowed": found.bounds.cosine,
            "order_equal": found.in_order,
            "failures": list(found.failures),
            "passed": found.passed,
        }

    def draw(self, file: Path) -> None:
        """Write the histogram of the texts' largest differences, on a logarithmic scale, as PNG."""
        figure = import_matplotlib()(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        sizes = np.clip(self.comparison.differences, FLOOR, 1e3)
        axes.hist(sizes, bins=np.logspace(-12, 3, 61).tolist())
        axes.axvline(self.comparison.allowed, color="tab:red", label=f"bound {self.comparison.allowed:.0e}")
        axes.set(xscale="log", xlabel="largest absolute difference of a text", ylabel="texts", title=self.model)
        axes.legend()
        try:
            figure.savefig(file, format="png")
        except OSError as error:
            raise StartupError(f"`--histogram`: cannot write {str(file)!r}: {type(error).__name__}") from error

    def _about(self) -> Iterator[Row]:
        yield Row("model", self.model, self.expected.about.get("reference", ""))
        yield Row("task", self.question.task)
        yield Row("dtype", self.ours.dtype, self.expected.dtype)
        for name in ABOUT:
            yield Row(name, self.ours.about.get(name, "not told"), self.expected.about.get(name, ""))

    def _measures(self) -> Iterator[Row]:
        found = self.comparison
        lengths = [len(ids) for ids in self.expected.token_ids]
        yield Row("texts", f"{found.texts}, of {min(lengths)} to {max(lengths)} tokens")
        yield Row("token ids", f"{found.equal_token_ids} of {found.texts} equal", "all must be")
        yield Row("largest difference", f"{found.differences.max():.1e}", f"at most {found.allowed:.1e}")
        if found.cosines is not None:
            least, mean = found.cosines.min(), found.cosines.mean()
            yield Row("cosine", f"min {least:.7f}, mean {mean:.7f}", f"at least {found.bounds.cosine}")
        if found.in_order is not None:
            yield Row("order of scores", "equal" if found.in_order else "changed", "must be equal")


def import_matplotlib() -> type[Any]:
    """The Figure of matplotlib, which needs no display. Raises StartupError naming the extra that installs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StartupError("`--histogram` needs matplotlib: pip install 'tei-grpc[verify]'") from error
    return Figure
