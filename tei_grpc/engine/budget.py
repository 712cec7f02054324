"""How large a batch should be on a CPU: as small as full throughput allows, so that a short text does not wait long."""

from collections.abc import Callable

SMALLEST = 256  # tokens
ENOUGH = 0.95  # of the best throughput
ROUNDS = 2  # of each measurement, of which the quicker counts
SECONDS = 0.4  # for all measurements together; a model too slow for more is one that small batches already keep busy


def choose_budget(measure: Callable[[int], float], max_tokens: int) -> int:
    """The smallest batch, in tokens, that comes within 5% of the best throughput seen; `max_tokens` at the most.

    `measure` runs a batch of so many tokens and returns the seconds it took. Sizes double until the time is up or
    `max_tokens` is reached.
    """
    rates: dict[int, float] = {}
    spent, tokens = 0.0, min(SMALLEST, max_tokens)
    while True:
        rounds = [measure(tokens) for _ in range(ROUNDS)]
        seconds = min(rounds)
        spent += sum(rounds)
        rates[tokens] = tokens / seconds
        if tokens == max_tokens or spent > SECONDS:
            break
        tokens = min(2 * tokens, max_tokens)
    enough = ENOUGH * max(rates.values())
    return min(size for size, rate in rates.items() if rate >= enough)
