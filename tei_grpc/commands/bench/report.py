"""What a benchmark looks like: a table with advice, or a JSON object."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tei_grpc.commands.bench.advice import Advice

if TYPE_CHECKING:
    from tei_grpc.commands.bench.subject import Encoded, Speed


@dataclass(frozen=True)
class Report:
    """All that was measured, and on what."""

    model: str
    cores: int
    encoded: "Encoded"
    speeds: "Sequence[Speed]"
    advice: Sequence[Advice]

    def as_table(self) -> str:
        """Texts per second by dtype and budget, the latency of one text, and the flags."""
        return "\n".join([*self._about(), "", *self._rates(), "", *self._flags()])

    def as_json(self) -> str:
        """One object on one line."""
        return json.dumps(
            {
                "model": self.model,
                "cores": self.cores,
                "texts": len(self.encoded.entries),
                "tokens": sum(map(len, self.encoded.entries)),
                "tokenized_texts_per_second": 1 / self.encoded.seconds,
                "short_text_tokens": len(self.encoded.short),
                "dtypes": {
                    speed.dtype: {"texts_per_second": speed.texts_per_second, "short_text_ms": speed.latency * 1e3}
                    for speed in self.speeds
                },
                "suggested": {advice.flag: {"value": advice.value, "reason": advice.reason} for advice in self.advice},
            }
        )

    def _about(self) -> Iterator[str]:
        lengths = sorted(map(len, self.encoded.entries))
        yield f"{self.model}, {self.cores} CPU cores, without gRPC"
        yield f"{len(lengths)} texts of {lengths[0]} to {lengths[-1]} tokens, half of them below {_middle(lengths)}"

    def _rates(self) -> Iterator[str]:
        budgets = list(self.speeds[0].texts_per_second)
        yield "texts/s, by tokens in a batch" + " " * 12 + f"one text of {len(self.encoded.short)} tokens"
        yield f"{'':10}" + "".join(f"{budget:>8}" for budget in budgets)
        for speed in self.speeds:
            rates = "".join(f"{_short(rate):>8}" for rate in speed.texts_per_second.values())
            yield f"{speed.dtype:10}{rates}{speed.latency * 1e3:12.2f} ms"

    def _flags(self) -> Iterator[str]:
        yield "Suggested:"
        width = max(len(f"{advice.flag} {advice.value}") for advice in self.advice)
        for advice in self.advice:
            yield f"  {f'{advice.flag} {advice.value}':{width}}  {advice.reason}"


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _middle(lengths: Sequence[int]) -> int:
    return lengths[len(lengths) // 2]
