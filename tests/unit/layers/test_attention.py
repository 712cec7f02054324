"""Every mask against attention written as its definition."""

import pytest
import torch

from tei_grpc.layers import attention as module
from tei_grpc.layers.attention import CAUSAL, Mask, attention
from tests.unit.layers.batches import packed_inputs
from tests.unit.layers.literal import literal_attention
from tests.unit.layers.masks import LENGTHS, TOKENS, masks, states


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("block", [1, 100, 3000, module.BLOCK_SCORES])
@pytest.mark.parametrize("long", [1, 9, module.LONG])
def test_attention_equals_its_definition(monkeypatch: pytest.MonkeyPatch, name: str, block: int, long: int) -> None:
    monkeypatch.setattr(module, "BLOCK_SCORES", block)
    monkeypatch.setattr(module, "LONG", long)
    query, key, value = (states(4, seed=seed) for seed in range(3))
    arguments = (query, (key, value), packed_inputs(*LENGTHS))
    found = attention(*arguments, scale=0.3, mask=masks()[name])
    torch.testing.assert_close(found, literal_attention(*arguments, scale=0.3, mask=masks()[name]))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("long", [1, module.LONG])
@pytest.mark.parametrize("name", ["full", "causal window", "distances"])
def test_query_heads_share_key_and_value_heads(
    monkeypatch: pytest.MonkeyPatch, name: str, kv_heads: int, long: int
) -> None:
    monkeypatch.setattr(module, "LONG", long)
    arguments = (states(4, seed=0), (states(kv_heads, seed=1), states(kv_heads, seed=2)), packed_inputs(*LENGTHS))
    mask = masks()[name]
    found = attention(*arguments, scale=1.0, mask=mask)
    torch.testing.assert_close(found, literal_attention(*arguments, scale=1.0, mask=mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("long", [1, module.LONG])
@pytest.mark.parametrize("name", masks())
def test_16_bit_attention_stays_close_to_its_definition(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, long: int
) -> None:
    monkeypatch.setattr(module, "LONG", long)
    query, key, value = (states(4, seed=seed).to(dtype) for seed in range(3))
    arguments = (query, (key, value), packed_inputs(*LENGTHS))
    found = attention(*arguments, scale=0.3, mask=masks()[name])
    assert found.dtype == dtype
    expected = literal_attention(*arguments, scale=0.3, mask=masks()[name])
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)


def test_full_attention_equals_torch() -> None:
    query, key, value = (states(4, seed=seed)[-30:] for seed in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (query, key, value)))
    found = attention(query, (key, value), packed_inputs(30), scale=8**-0.5)
    torch.testing.assert_close(found, expected[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (2, 2), (None, 0), (1, None)])
@pytest.mark.parametrize("long", [1, module.LONG])
def test_window_is_exact(monkeypatch: pytest.MonkeyPatch, left: int | None, right: int | None, long: int) -> None:
    """Equal scores and one-hot values: the output row says which keys the query saw."""
    monkeypatch.setattr(module, "LONG", long)
    monkeypatch.setattr(module, "BLOCK_SCORES", 12)  # blocks of two queries in a long text
    zeros = torch.zeros(6, 1, 6)
    seen = attention(zeros, (zeros, torch.eye(6)[:, None]), packed_inputs(6), scale=1.0, mask=Mask(left, right)) > 0
    for query in range(6):
        first = 0 if left is None else max(0, query - left)
        last = 5 if right is None else min(5, query + right)
        assert seen[query].nonzero().flatten().tolist() == list(range(first, last + 1))


@pytest.mark.parametrize("long", [1, module.LONG])
def test_nan_stays_in_its_own_text(monkeypatch: pytest.MonkeyPatch, long: int) -> None:
    monkeypatch.setattr(module, "LONG", long)
    query, key, value = (states(4, seed=seed) for seed in range(3))
    inputs = packed_inputs(*LENGTHS)
    clean = attention(query, (key, value), inputs, scale=1.0)
    start, stop = inputs.offsets[2], inputs.offsets[3]
    for poisoned in (query, key, value):
        poisoned[start + 1] = torch.nan
    found = attention(query, (key, value), inputs, scale=1.0)
    others = torch.ones(TOKENS, dtype=torch.bool)
    others[start:stop] = False
    assert found[others].equal(clean[others])
    assert found[start:stop].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    query = torch.full((4, 1, 8), 1e4)
    found = attention(query, (query, query), packed_inputs(4), scale=1.0)
    torch.testing.assert_close(found, query.flatten(1))


def test_windows_are_kept_for_few_lengths() -> None:
    module._window.cache_clear()
    for length in range(1, 130):
        states = torch.zeros(length, 1, 8)
        attention(states, (states, states), packed_inputs(length), scale=1.0, mask=CAUSAL)
    assert module._window.cache_info().currsize == 9  # 1, 2, 4, ... 256
