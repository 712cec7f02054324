import pytest

from tei_grpc.engine.budget import choose_budget, mixed_lengths


def measured(fixed: float, per_token: float, asked: list[int]):
    def measure(tokens: int) -> float:
        asked.append(tokens)
        return fixed + per_token * tokens

    return measure


def test_smallest_batch_within_five_percent_of_the_best_is_chosen() -> None:
    # with a millisecond between two: 256 -> 0.72, 512 -> 0.84, 1024 -> 0.91, 2048 -> 0.95, 4096 -> 0.98 of the limit
    assert choose_budget(measured(0.9e-3, 19e-6, []), 4096) == 2048


def test_model_that_is_as_fast_in_small_batches_gets_small_ones() -> None:
    assert choose_budget(measured(0.0, 5e-4, []), 16384) == 256


@pytest.mark.parametrize("max_tokens", [1, 100, 256, 300])
def test_limit_is_never_exceeded(max_tokens: int) -> None:
    asked: list[int] = []
    assert choose_budget(measured(1e-3, 1e-9, asked), max_tokens) <= max_tokens
    assert max(asked) <= max_tokens


def test_slow_model_is_not_measured_for_long() -> None:
    asked: list[int] = []
    choose_budget(measured(0.0, 0.01, asked), 16384)
    assert asked == [256] * 3


@pytest.mark.parametrize("longest", [20, 64, 512])
@pytest.mark.parametrize("tokens", [1, 9, 10, 256, 1000, 4096])
def test_batches_are_measured_with_texts_of_many_lengths(tokens: int, longest: int) -> None:
    lengths = mixed_lengths(tokens, longest)
    assert sum(lengths) == tokens
    assert lengths == sorted(lengths)
    assert max(lengths) <= longest
    assert len(set(lengths)) >= min(4, tokens // 32)
