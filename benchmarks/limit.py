"""The machine's limit: how many texts a second it could do if it only multiplied, at oneDNN's best rate.

    python -m benchmarks.limit [--model bert-base] [--dtype float32 bfloat16]

The limit of a workload is the FLOPs of its linear layers and of its attention, over the rate that oneDNN reaches on
this machine, now, for the linear layers of the model, with 4,096 rows and weights laid out beforehand. No engine gets
there: norms, activations, softmax and lookups take time, too.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch

from benchmarks.measurements import Clock, Measurements, choose_clock
from benchmarks.options import Options, parser
from benchmarks.results import publish

ROWS = 4096
SECONDS = 0.3  # at least, of multiplying per measurement
MEASURED = ("float32", "bfloat16")  # the dtypes of oneDNN's pointwise linear layer


class Shape(NamedTuple):
    """What decides the FLOPs of a BERT."""

    layers: int
    hidden: int
    intermediate: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From config.json."""
        config = json.loads((folder / "config.json").read_text())
        return cls(config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"])

    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's products: q, k and v as one, the output, and the two of the MLP."""
        return [
            (self.hidden, 3 * self.hidden),
            (self.hidden, self.hidden),
            (self.hidden, self.intermediate),
            (self.intermediate, self.hidden),
        ]

    def flops(self, lengths: Sequence[int]) -> float:
        """Of all linear layers and of attention's two products; a multiplication and an addition are two."""
        linear = sum(2 * columns * rows for columns, rows in self.linears())
        return float(self.layers * sum(linear * n + 4 * self.hidden * n * n for n in lengths))


class Gemm:
    """The linear layers of one layer, and nothing else."""

    def __init__(self, shape: Shape, dtype: str, rows: int = ROWS) -> None:
        self._flops = sum(2.0 * rows * size * out for size, out in shape.linears())
        self._products = [_operands(rows, size, out, getattr(torch, dtype)) for size, out in shape.linears()]

    def rate(self, clock: Clock, seconds: float = SECONDS) -> float:
        """FLOP/s."""
        passes, start, stop = 0, clock(), time.perf_counter() + seconds
        with torch.inference_mode():
            while not passes or time.perf_counter() < stop:
                for x, weight in self._products:
                    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
                passes += 1
        return passes * self._flops / (clock() - start)


def _operands(rows: int, size: int, out: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(out, size).to(dtype)
    return torch.randn(rows, size).to(dtype), torch.ops.mkldnn._reorder_linear_weight(weight, None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and publish."""
    options = Options(parser(__doc__).parse_args(arguments))
    shape, clock = Shape.read(options.folder), choose_clock(cpu_time=options.cpu_time)
    gemms = {dtype: Gemm(shape, dtype) for dtype in options.dtypes if dtype in MEASURED}
    rates, texts = Measurements("GFLOP/s"), Measurements("texts/s")
    workloads = options.workloads()
    for gemm in gemms.values():
        gemm.rate(clock, 0)  # the first pass makes the kernels
    for _ in range(options.rounds):
        for dtype, gemm in gemms.items():
            rate = gemm.rate(clock)
            rates.add("linear layers", dtype, rate / 1e9)
            for name, some in workloads.items():
                texts.add(name, f"{dtype} limit", len(some) * rate / shape.flops(some.lengths))
    publish("limit", [*rates.rows(), *texts.rows()], options.output, **options.about)


if __name__ == "__main__":
    main()
