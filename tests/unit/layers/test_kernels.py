"""The kernels of a CUDA device, on a CPU: what they are handed, which is chosen, and what they give."""

import inspect
import logging
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tei_grpc.engine.runner import WARM_UP
from tei_grpc.layers import varlen
from tei_grpc.layers.attention import CAUSAL, FULL, Mask, attention
from tei_grpc.layers.bias import alibi_bias
from tei_grpc.layers.flex import BLOCK, Flex, key_blocks
from tei_grpc.layers.grouped import attend_by_group
from tei_grpc.layers.kernels import BY_GROUP, Call, Kernels, choose_kernels, fastest, is_right, sample
from tei_grpc.layers.packed import Attend
from tei_grpc.layers.varlen import Varlen, of_flash_attn, of_torch, window
from tests import stand_ins
from tests.unit.layers.batches import packed_inputs
from tests.unit.layers.literal import literal_attention
from tests.unit.layers.masks import LENGTHS, masks, states

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def torchs() -> Varlen:
    return next(of_torch(stand_ins.varlen_attn))


ATTENDS: dict[str, Attend] = {"varlen": torchs(), "flex": Flex(flex_attention), "by group": attend_by_group}
PAIRS = [(kernel, name) for kernel in ATTENDS for name, mask in masks().items() if kernel != "varlen" or not mask.bias]


@pytest.mark.parametrize(("kernel", "name"), PAIRS)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_kernel_equals_the_definition_of_attention(kernel: str, name: str, kv_heads: int) -> None:
    mask, inputs = masks()[name], packed_inputs(*LENGTHS)
    query, key, value = states(4, seed=0), states(kv_heads, seed=1), states(kv_heads, seed=2)
    expected = literal_attention(query, (key, value), inputs, scale=0.3, mask=mask)
    found = attention(query, (key, value), replace(inputs, attend=ATTENDS[kernel]), scale=0.3, mask=mask)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["full", "causal window", "alibi", "disentangled"])
def test_masks_of_long_texts_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("tei_grpc.layers.grouped.MASK_VALUES", 4 * 30 * 7)
    query, key, value = (states(4, seed=seed) for seed in range(3))
    call = Call(query, (key, value), packed_inputs(*LENGTHS), 0.3, masks()[name])
    torch.testing.assert_close(call.to(attend_by_group), call.to(literal_attention))


@pytest.mark.parametrize("poisoned", range(3))
@pytest.mark.parametrize("kernel", ATTENDS)
def test_nan_stays_in_its_own_text(kernel: str, poisoned: int) -> None:
    query, key, value = (states(4, seed=seed) for seed in range(3))
    inputs = packed_inputs(*LENGTHS)
    call = Call(query, (key, value), inputs, 1.0, FULL)
    clean = call.to(ATTENDS[kernel])
    start, stop = inputs.offsets[2], inputs.offsets[3]
    (query, key, value)[poisoned][start : start + 2] = torch.nan
    found = call.to(ATTENDS[kernel])
    assert found[start:stop].isnan().all(dim=1).any()
    assert found[:start].equal(clean[:start])
    assert found[stop:].equal(clean[stop:])


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (FULL, (-1, -1)),
        (CAUSAL, (-1, 0)),
        (Mask(left=5, right=0), (5, 0)),
        (Mask(left=4, right=4), (4, 4)),
        (Mask(left=3), (3, -1)),
    ],
)
def test_window_is_spelled_as_flash_attention_reads_it(mask: Mask, expected: tuple[int, int]) -> None:
    assert window(mask) == expected


def test_stand_in_has_the_signature_of_torchs_kernel() -> None:
    from torch.nn.attention.varlen import varlen_attn

    assert list(inspect.signature(stand_ins.varlen_attn).parameters) == list(inspect.signature(varlen_attn).parameters)


def test_kernel_with_fewer_arguments_is_called_without_them() -> None:
    def older(q: Tensor, k: Tensor, v: Tensor, *bounds: object, scale: float, window_size: tuple[int, int]) -> Tensor:
        return stand_ins.varlen_attn(q, k, v, *bounds, scale=scale, window_size=window_size, enable_gqa=True)

    assert is_right(next(of_torch(older)), sample(CPU, torch.bfloat16))


def test_kernel_without_windows_is_not_used() -> None:
    assert list(of_torch(lambda query, key, value, is_causal=False: query)) == []


def test_kernel_that_refuses_to_keep_its_sums_in_one_piece_is_asked_again_without() -> None:
    def refuses(*states: Tensor, num_splits: int | None = None, **options: object) -> Tensor:
        if num_splits is not None:
            raise RuntimeError("num_splits is for FA3")
        return stand_ins.varlen_attn(*states, **options)

    refuses.__signature__ = inspect.signature(stand_ins.varlen_attn)
    first, second = of_torch(refuses)
    assert not is_right(first, sample(CPU, torch.bfloat16))
    assert is_right(second, sample(CPU, torch.bfloat16))


def test_flash_attn_is_handed_the_same() -> None:
    def flash_attn_varlen_func(  # as of flash-attn 2
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return stand_ins.varlen_attn(q, k, v, *bounds, scale=softmax_scale, window_size=window_size, enable_gqa=True)

    call = sample(CPU, torch.bfloat16)
    kernel = of_flash_attn(flash_attn_varlen_func)
    for mask in (FULL, CAUSAL, Mask(left=20, right=0)):
        assert call._replace(mask=mask).to(kernel).equal(call._replace(mask=mask).to(torchs()))


def test_fastest_of_the_kernels_that_are_right_is_taken() -> None:
    wrong = Varlen("wrong", lambda query, *_: query * 0)
    slow, quick = (Varlen(name, torchs().run) for name in ("slow", "quick"))
    times = iter([2.0, 1.0])
    assert fastest([wrong, slow, quick], sample(CPU, torch.bfloat16), lambda run: next(times)) is quick


def test_first_way_to_call_a_kernel_is_kept_where_it_is_right() -> None:
    first, second = of_torch(stand_ins.varlen_attn)
    assert fastest([first, second], sample(CPU, torch.bfloat16), lambda run: 1 / 0) is first


def test_kernel_that_is_wrong_at_the_models_head_size_is_not_used() -> None:
    def run(query: Tensor, *rest: object) -> Tensor:
        return torchs().run(query, *rest) * (1 if query.shape[2] == 64 else 1.1)

    found = fastest([Varlen("wrong at others", run)], sample(CPU, torch.bfloat16), lambda run: 0.0)
    assert found is not None
    assert attended(kernels(found), head_dim=64) == ["wrong at others"]
    assert attended(kernels(found), head_dim=8) == ["flex_attention"]


def test_kernel_is_proven_where_16_bits_are_too_small_for_the_model() -> None:
    call = sample(CPU, torch.bfloat16)
    call.key_value[1][3] = torch.inf
    assert is_right(torchs(), call)
    assert not is_right(Varlen("wrong", lambda *call: torchs().run(*call) * 1.1), call)


def test_attention_by_groups_says_that_it_needs_lengths() -> None:
    call = sample(CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="lengths of the texts"):
        call._replace(inputs=replace(call.inputs, groups=())).to(attend_by_group)


@pytest.mark.parametrize("kernels", [[], [Varlen("absent", lambda *_: 1 / 0)]])
def test_there_may_be_no_flash_attention(kernels: list[Varlen]) -> None:
    assert fastest(kernels, sample(CPU, torch.bfloat16), lambda run: 0.0) is None


def test_torchs_kernel_is_refused_where_it_does_not_run() -> None:
    assert fastest(varlen.find_varlen(), sample(CPU, torch.bfloat16), lambda run: 0.0) is None


@pytest.mark.parametrize(
    ("capability", "dtype", "flash", "found"),
    [
        ((8, 0), torch.bfloat16, True, "varlen_attn"),
        ((9, 0), torch.float16, True, "varlen_attn"),
        ((7, 5), torch.float16, True, None),  # a card before Ampere
        ((9, 0), torch.float32, True, None),
        ((9, 0), torch.bfloat16, False, None),  # USE_FLASH_ATTENTION=false
    ],
)
def test_flash_attention_is_for_16_bits_on_newer_cards_unless_it_is_turned_off(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    flash: bool,
    found: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(varlen, "find_varlen", lambda: of_torch(stand_ins.varlen_attn))
    chosen = choose_kernels(CPU, dtype, flash=flash).flash
    assert (None if chosen is None else chosen.name) == found


def attended(kernels: Kernels, mask: Mask = FULL, dtype: torch.dtype = torch.bfloat16, head_dim: int = 8) -> list[str]:
    query, key, value = (states(4, seed=seed, head_dim=head_dim).to(dtype) for seed in range(3))
    Call(query, (key, value), packed_inputs(*LENGTHS), 0.3, mask).to(kernels)
    return list(kernels.names)


def kernels(flash: Varlen | None = None) -> Kernels:
    return Kernels(torch.bfloat16, flash, lambda: Flex(flex_attention))


def test_flash_attention_takes_what_it_can() -> None:
    assert attended(kernels(torchs())) == ["varlen_attn"]


@pytest.mark.parametrize("other", [{"head_dim": 12}, {"head_dim": 264}, {"mask": masks()["alibi"]}])
def test_what_flash_attention_does_not_take_runs_on_flex_attention(other: dict) -> None:
    assert attended(kernels(torchs()), **other) == ["flex_attention"]


def test_without_flash_attention_all_runs_on_flex_attention() -> None:
    assert attended(kernels()) == ["flex_attention"]


def test_recovery_in_float32_compiles_nothing() -> None:
    assert attended(kernels(torchs()), dtype=torch.float32) == [BY_GROUP]


def test_flex_attention_that_does_not_compile_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: object, **options: object) -> Tensor:
        raise RuntimeError("no Triton")

    caplog.set_level(logging.INFO, logger="tei_grpc.layers.kernels")
    assert attended(Kernels(torch.bfloat16, None, lambda: Flex(broken))) == [BY_GROUP]
    assert "no Triton" in caplog.text


def test_kernel_is_chosen_once_for_each_kind_of_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tei_grpc.layers.kernels")
    some = kernels(torchs())
    for mask in (FULL, CAUSAL, FULL, CAUSAL):
        attended(some, mask)
    assert [record.message for record in caplog.records] == [
        "attention (torch.bfloat16, heads of 8, window (None, None)): varlen_attn",
        "attention (torch.bfloat16, heads of 8, window (None, 0)): varlen_attn",
    ]


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask(left=40, right=40), Mask(left=100, right=0)])
def test_blocks_of_keys_hold_every_key_that_is_seen_and_no_whole_block_more(mask: Mask) -> None:
    offsets = np.cumsum([0, 5, 200, 1, 300, 128, 90])
    first, stop = key_blocks(offsets, mask)
    texts = np.repeat(np.arange(6), np.diff(offsets))
    distance = np.arange(len(texts)) - np.arange(len(texts))[:, None]
    seen = texts == texts[:, None]
    seen &= distance >= -(len(texts) if mask.left is None else mask.left)
    seen &= distance <= (len(texts) if mask.right is None else mask.right)
    for block in range(len(first)):
        keys = np.flatnonzero(seen[block * BLOCK : (block + 1) * BLOCK].any(0))
        assert (first[block], stop[block]) == (keys[0] // BLOCK, keys[-1] // BLOCK + 1)


def test_flex_attention_is_compiled_once_for_all_batches() -> None:
    """By torch's tracer alone, which decides that; the code that a CUDA device would get is not made."""
    torch._dynamo.reset()
    graphs = []

    def count(module: torch.fx.GraphModule, _: object):
        graphs.append(module)
        return module.forward

    flex = Flex(torch.compile(flex_attention, dynamic=True, backend=count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lengths in ([130, 140], [300, 20, 9], [500], [150, 3, 3, 200]):
            inputs = packed_inputs(*lengths)
            query = torch.randn(sum(lengths), 2, 8)
            call = Call(query, (query, query), inputs, 0.3, Mask(bias=alibi_bias(2, inputs)))
            torch.testing.assert_close(call.to(flex), call.to(attend_by_group))
    assert len(graphs) == 1


@pytest.mark.parametrize("heads", [2, 12])
def test_flex_attention_meets_no_size_while_serving_that_warm_up_has_not_compiled(heads: int) -> None:
    torch._dynamo.reset()
    graphs = []

    def count(module: torch.fx.GraphModule, _: object):
        graphs.append(module)
        return module.forward

    def attend(*lengths: int) -> None:
        query = torch.randn(sum(lengths), heads, 8)
        Call(query, (query, query), packed_inputs(*lengths), 0.3, FULL).to(flex)

    flex = Flex(torch.compile(flex_attention, dynamic=True, backend=count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lengths in WARM_UP:
            attend(*lengths)
        compiled = len(graphs)
        for lengths in ([5], [100, 20], [1], [500, 3], [2, 2, 2], [700]):
            attend(*lengths)
    assert len(graphs) == compiled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", masks())
def test_kernels_of_the_device_equal_the_cpu(dtype: torch.dtype, name: str) -> None:
    device = torch.device("cuda")
    query, key, value = (states(4, seed=seed, head_dim=64).to(dtype) for seed in range(3))
    call = Call(query, (key, value), packed_inputs(*LENGTHS), 0.3, masks()[name])
    bias = call.mask.bias
    if bias is not None:
        moved = {field: getattr(bias, field).to(device) for field in bias.__slots__ if getattr(bias, field) is not None}
        bias = replace(bias, **moved)
    inputs = replace(
        call.inputs,
        **{name: getattr(call.inputs, name).to(device) for name in ("input_ids", "cu_seqlens", "text_ids")},
        attend=choose_kernels(device, dtype, flash=True),
    )
    found = attention(
        query.to(device), (key.to(device), value.to(device)), inputs, scale=0.3, mask=replace(call.mask, bias=bias)
    )
    torch.testing.assert_close(found.cpu(), call.to(literal_attention), atol=0.02, rtol=0.02)
