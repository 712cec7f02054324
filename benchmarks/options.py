"""The options that the benchmarks share."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workloads import WORKLOADS, find_model, read_limit, write_texts

SHORT = 8  # how many times fewer texts the short form runs
SHORT_ROUNDS = 3


@dataclass(frozen=True)
class Texts:
    """A workload as it is run."""

    lengths: Sequence[int]
    texts: Sequence[str]

    def __len__(self) -> int:
        return len(self.texts)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the shared options."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", default="minilm", help="minilm, bert-base (random weights), or a directory")
    result.add_argument("--workloads", default="QPL", help="of Q, P and L [default: %(default)s]")
    result.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    result.add_argument("--rounds", type=int, help="[default: 5]")
    result.add_argument("--texts", type=int, help="texts of each workload")
    result.add_argument("--short", action="store_true", help="an eighth of the texts, three rounds")
    result.add_argument("--cpu-time", action="store_true", help="CPU time instead of the wall's: for busy machines")
    result.add_argument("--output", type=Path, default=Path("results"), help="directory of JSON and plots")
    return result


class Options:
    """The shared options as given, and what follows from them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder = find_model(arguments.model)
        self.dtypes: list[str] = arguments.dtype
        self.rounds: int = arguments.rounds or (SHORT_ROUNDS if arguments.short else 5)
        self.cpu_time: bool = arguments.cpu_time
        self.output: Path = arguments.output
        self.divisor = SHORT if arguments.short else 1
        self._texts: int | None = arguments.texts
        self._names: str = arguments.workloads
        self.about = {"model": arguments.model, "clock": "CPU time" if self.cpu_time else "wall", "rounds": self.rounds}

    def workloads(self) -> dict[str, Texts]:
        """The texts of each workload, none longer than the model takes."""
        return {name: self._texts_of(name) for name in self._names}

    def _texts_of(self, name: str) -> Texts:
        workload = WORKLOADS[name]
        lengths = workload.lengths(self._texts or workload.texts // self.divisor, read_limit(self.folder))
        return Texts(lengths, write_texts(self.folder, lengths))
