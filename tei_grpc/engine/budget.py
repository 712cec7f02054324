"""How large a batch should be on a CPU: as small as full throughput allows, so that a short text does not wait long."""

from collections.abc import Callable, Iterator
from itertools import cycle

LENGTHS = (9, 12, 17, 25, 36, 52, 75, 108)  # tokens of the texts to measure with, over and over: short and long ones
SMALLEST = 256  # tokens
ENOUGH = 0.95  # of the best throughput
ROUNDS = 3  # over all sizes, of which the quickest counts for each
SECONDS = 0.25  # for a round; a model too slow for more is one that small batches already keep busy
GAP_SECONDS = 0.002  # that a batch costs under load besides, in caches and in waiting; larger ones have fewer


def choose_budget(measure: Callable[[int], float], max_tokens: int) -> int:
    """The smallest batch, in tokens, that comes within 5% of the best throughput seen; `max_tokens` at the most.

    `measure` runs a batch of so many tokens and returns the seconds it took. Sizes double until the time is up or
    `max_tokens` is reached.
    """
    seconds = dict(_first_round(measure, max_tokens))
    for _ in range(ROUNDS - 1):
        for tokens in seconds:
            seconds[tokens] = min(seconds[tokens], measure(tokens))
    rates = {tokens: tokens / (quickest + GAP_SECONDS) for tokens, quickest in seconds.items()}
    enough = ENOUGH * max(rates.values())
    return min(size for size, rate in rates.items() if rate >= enough)


def _first_round(measure: Callable[[int], float], max_tokens: int) -> Iterator[tuple[int, float]]:
    spent, tokens = 0.0, min(SMALLEST, max_tokens)
    while True:
        seconds = measure(tokens)
        yield tokens, seconds
        spent += seconds
        if tokens == max_tokens or spent > SECONDS:
            return
        tokens = min(2 * tokens, max_tokens)


def mixed_lengths(tokens: int, longest: int) -> list[int]:
    """Of texts that have so many tokens together, the shortest first: batches of equal texts would be too fast."""
    lengths: list[int] = []
    for length in cycle(LENGTHS):
        lengths.append(min(length, longest, tokens))
        tokens -= lengths[-1]
        if not tokens:
            break
    return sorted(lengths)
