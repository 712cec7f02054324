"""The kernels of a CUDA device, on a CPU: what each gives, and which is chosen for a call."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tei_grpc.layers import varlen
from tei_grpc.layers.attention import CAUSAL, FULL, Mask, attention
from tei_grpc.layers.flex import Flex
from tei_grpc.layers.grouped import attend_by_group
from tei_grpc.layers.kernels import BY_GROUP, Call, Kernels, choose_kernels, fastest, sample
from tei_grpc.layers.packed import Attend
from tei_grpc.layers.varlen import Varlen, of_torch
from tests import stand_ins
from tests.stand_ins import torchs
from tests.unit.layers.batches import packed_inputs
from tests.unit.layers.literal import literal_attention
from tests.unit.layers.masks import LENGTHS, masks, states

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
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


def test_kernel_that_is_wrong_at_the_models_head_size_is_not_used() -> None:
    def run(query: Tensor, *rest: object) -> Tensor:
        return torchs().run(query, *rest) * (1 if query.shape[2] == 64 else 1.1)

    found = fastest([Varlen("wrong at others", run)], sample(CPU, torch.bfloat16), lambda run: 0.0)
    assert found is not None
    assert attended(kernels(found), head_dim=64) == ["wrong at others"]
    assert attended(kernels(found), head_dim=8) == ["flex_attention"]


def test_attention_by_groups_says_that_it_needs_lengths() -> None:
    call = sample(CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="lengths of the texts"):
        call._replace(inputs=replace(call.inputs, groups=())).to(attend_by_group)


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
