"""Which flags the measurements speak for, and why."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tei_grpc.commands.bench.subject import Speed

ENOUGH = 0.95  # of the best throughput
WORTH = 1.1  # times as fast, for a dtype that rounds more


class Advice(NamedTuple):
    """A flag, its value, and the reason."""

    flag: str
    value: str
    reason: str


def advise(model: str, speeds: "Sequence[Speed]", tokenizing: float) -> list[Advice]:
    """From at least one speed, the first one being that of the most exact dtype; `tokenizing` is seconds per text."""
    dtype, speed = advise_dtype(model, speeds)
    budget = advise_budget(speed)
    return [dtype, budget, advise_workers(speed.texts_per_second[int(budget.value)], tokenizing)]


def advise_dtype(model: str, speeds: "Sequence[Speed]") -> "tuple[Advice, Speed]":
    """The fastest, where that is worth it; and its speed."""
    exact, fastest = speeds[0], max(speeds, key=_best)
    times = _best(fastest) / _best(exact)
    if times < WORTH:
        return Advice("--dtype", exact.dtype, "no other dtype measured is clearly faster"), exact
    check = f"`tei-grpc verify {model} --dtype {fastest.dtype}` tells how exact it is"
    return Advice("--dtype", fastest.dtype, f"{times:.1f} times as fast as {exact.dtype}; {check}"), fastest


def advise_budget(speed: "Speed") -> Advice:
    """The smallest within 5 % of the best."""
    rates = speed.texts_per_second
    budget = min(tokens for tokens, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
    share, wait = rates[budget] / max(rates.values()), speed.batch_seconds[budget] * 1e3
    return Advice(
        "--max-batch-tokens",
        str(budget),
        f"{share:.0%} of the best throughput; a text that comes while a batch runs waits up to {wait:.0f} ms for it",
    )


def advise_workers(texts_per_second: float, tokenizing: float) -> Advice:
    """Enough threads to keep up with the model, and no more: they share its cores."""
    workers = max(1, math.ceil(texts_per_second * tokenizing))
    return Advice(
        "--tokenization-workers",
        str(workers),
        f"one thread tokenizes {1 / tokenizing:,.0f} texts/s, the model computes {texts_per_second:,.0f}",
    )


def _best(speed: "Speed") -> float:
    return max(speed.texts_per_second.values())
