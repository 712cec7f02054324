"""Compiled attention against its definition, at the edges of its tiles, and what a text gets beside others."""

import random
from functools import cache

import llvmlite.binding as llvm
import pytest
import torch
from torch import Tensor

from tei_grpc.layers import attention_kernel
from tei_grpc.layers.attention import CAUSAL, FULL, Mask, States
from tei_grpc.layers.attention_kernel import Kernel
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.simd import LEAST_LANES
from tei_grpc.layers.simd_attention import SimdAttention
from tests.unit.layers.batches import packed_inputs, unchecked_inputs
from tests.unit.layers.literal import literal_attention

MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "window": Mask(left=3, right=3),
    "wide window": Mask(left=1000, right=1000),
    "lopsided window": Mask(left=5, right=1),
    "causal window": Mask(left=5, right=0),
    "self only": Mask(left=0, right=0),
    "left only": Mask(left=2),
    "right only": Mask(right=9),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
AROUND_TILES = (*range(1, 41), 70)
LENGTHS = (1, 7, 33, 8, 9, 30, 2, 17)


@cache
def kernel(dtype: torch.dtype = torch.float32, head_dim: int = 8, is_windowed: bool = False) -> SimdAttention:
    return SimdAttention(dtype, head_dim, is_windowed=is_windowed)


def states(rows: int, heads: int, head_dim: int = 8, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def attend(query: Tensor, key: Tensor, value: Tensor, inputs: PackedInputs, mask: Mask = FULL) -> Tensor:
    compiled = kernel(query.dtype, query.shape[2], mask.is_windowed)
    return compiled(query, (key, value), inputs, scale=0.3, mask=mask)


def check(query: Tensor, key: Tensor, value: Tensor, inputs: PackedInputs, mask: Mask = FULL) -> None:
    found = attend(query, key, value, inputs, mask)
    assert found.dtype == query.dtype
    expected = literal_attention(query, (key, value), inputs, scale=0.3, mask=mask)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch):
    """A CPU with AVX2, on those that have it: vectors of 8 floats."""
    monkeypatch.setattr(attention_kernel, "widest", lambda: LEAST_LANES)
    if llvm.get_host_cpu_features().get("avx2"):
        features = {name: has and "avx512" not in name for name, has in llvm.get_host_cpu_features().items()}
        monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "haswell")
        monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap(features))


@pytest.mark.parametrize("name", MASKS)
def test_every_length_around_lanes_and_tiles_equals_the_definition(name: str) -> None:
    inputs = packed_inputs(*AROUND_TILES)
    check(*(states(sum(AROUND_TILES), 1, seed=seed) for seed in range(3)), inputs, MASKS[name])


@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 128])
@pytest.mark.parametrize("name", ["full", "lopsided window"])
def test_every_head_size_equals_the_definition(name: str, head_dim: int) -> None:
    query, key, value = (states(sum(LENGTHS), 2, head_dim, seed=seed) for seed in range(3))
    check(query, key, value, packed_inputs(*LENGTHS), MASKS[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["full", "causal", "lopsided window"])
def test_16_bits_differ_from_the_definition_by_their_rounding_alone(name: str, dtype: torch.dtype) -> None:
    query, key, value = (states(sum(LENGTHS), 2, 32, seed=seed).to(dtype) for seed in range(3))
    check(query, key, value, packed_inputs(*LENGTHS), MASKS[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_256_equal_the_definition(dtype: torch.dtype) -> None:
    query, key, value = (states(30, 1, 256, seed=seed).to(dtype) for seed in range(3))
    check(query, key, value, packed_inputs(30))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_windowed", [False, True])
def test_vectors_of_8_floats_equal_the_definition(dtype: torch.dtype, is_windowed: bool) -> None:
    compiled, mask = (
        SimdAttention(dtype, 32, is_windowed=is_windowed),
        MASKS["lopsided window"] if is_windowed else FULL,
    )
    query, key, value = (states(sum(LENGTHS), 2, 32, seed=seed).to(dtype) for seed in range(3))
    arguments = (query, (key, value), packed_inputs(*LENGTHS))
    expected = literal_attention(*arguments, scale=0.3, mask=mask)
    torch.testing.assert_close(compiled(*arguments, scale=0.3, mask=mask), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_arm_the_kernel_is_vectors_throughout(dtype: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine(cpu="neoverse-n1", opt=3)
    kernel = Kernel(dtype, 24, is_windowed=True)  # three vectors of LEAST_LANES, which is what ARM takes
    kernel._write()
    kernel._code.build.ret_void()
    code = str(kernel._code._module).replace(llvm.get_default_triple(), target.triple)
    assembly = target.emit_assembly(llvm.parse_assembly(code)).split()
    assert "fmla" in assembly
    assert "bl" not in assembly  # no product, rounding or conversion is a call


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("name", ["full", "causal window"])
def test_query_heads_share_key_and_value_heads(name: str, heads: int, kv_heads: int) -> None:
    rows = sum(LENGTHS)
    query, key, value = (states(rows, count, seed=seed) for seed, count in enumerate((heads, kv_heads, kv_heads)))
    check(query, key, value, packed_inputs(*LENGTHS), MASKS[name])


def of_one_product(product: Tensor) -> tuple[Tensor, ...]:
    return product.unflatten(1, (3, 4)).unbind(1)


def interleaved(product: Tensor) -> tuple[Tensor, ...]:
    return product.unflatten(1, (4, 3)).unbind(2)


def expanded(product: Tensor) -> tuple[Tensor, ...]:
    return product[:, :4], product[:, 4:5].expand(-1, 4, -1), product[:, 5:6].expand(-1, 4, -1)


def across(product: Tensor) -> tuple[Tensor, ...]:
    turned = product.transpose(1, 2).contiguous().transpose(1, 2)
    return turned[:, :4], turned[:, 4:8], turned[:, 8:]


def every_second_row(product: Tensor) -> tuple[Tensor, ...]:
    rows = product.repeat_interleave(2, 0)[::2]
    return rows[:, :4], rows[:, 4:8], rows[:, 8:]


@pytest.mark.parametrize("view", [of_one_product, interleaved, expanded, across, every_second_row])
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_read_as_they_lie(view, dtype: torch.dtype) -> None:
    inputs, seen = packed_inputs(*LENGTHS), view(states(sum(LENGTHS), 12).to(dtype))
    assert attend(*seen, inputs).equal(attend(*(x.contiguous() for x in seen), inputs))


def test_threads_do_not_change_a_bit(threads: int) -> None:
    lengths = random.Random(1).choices(range(1, 90), k=40)
    query, key, value = (states(sum(lengths), 2, seed=seed) for seed in range(3))
    found = attend(query, key, value, packed_inputs(*lengths))
    torch.set_num_threads(1)
    assert found.equal(attend(query, key, value, packed_inputs(*lengths)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["full", "lopsided window"])
def test_a_text_gets_the_same_bits_alone_and_in_any_batch(name: str, dtype: torch.dtype) -> None:
    generator = random.Random(2)
    texts = [states(length, 6, 32, seed=length).to(dtype) for length in (*AROUND_TILES, 129, 300)]
    alone = [attend(*text.tensor_split(3, 1), packed_inputs(len(text)), MASKS[name]) for text in texts]
    for _ in range(5):
        order = generator.sample(range(len(texts)), generator.randint(2, len(texts)))
        inputs = packed_inputs(*(len(texts[number]) for number in order))
        found = attend(*torch.cat([texts[number] for number in order]).tensor_split(3, 1), inputs, MASKS[name])
        for number, (start, stop) in zip(order, zip(inputs.offsets, inputs.offsets[1:], strict=False), strict=True):
            assert found[start:stop].equal(alone[number])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_what_is_not_finite_stays_in_its_text_and_is_seen_there(poisoned: int, poison: float) -> None:
    seen = [states(sum(LENGTHS), 2, seed=seed) for seed in range(3)]
    inputs = packed_inputs(*LENGTHS)
    clean = attend(*seen, inputs)
    start, stop = inputs.offsets[2], inputs.offsets[3]
    seen[poisoned][start + 20, :, 3] = poison
    check(*seen, inputs)
    found = attend(*seen, inputs)
    assert found[:start].equal(clean[:start])
    assert found[stop:].equal(clean[stop:])


def test_a_key_that_is_nan_makes_all_that_see_it_nan() -> None:
    query, key, value = (states(20, 1, seed=seed) for seed in range(3))
    key[15, 0, 0] = torch.nan
    seen_by = attend(query, key, value, packed_inputs(20), Mask(left=2, right=1)).isnan().all(1)
    assert seen_by.nonzero().flatten().tolist() == [14, 15, 16, 17]


@pytest.mark.parametrize("size", [1e4, 1e15, 1e30])
def test_huge_scores_are_those_of_the_definition(size: float) -> None:
    query, key, value = (states(sum(LENGTHS), 2, seed=seed) for seed in range(3))
    check(query * size, key * size, value, packed_inputs(*LENGTHS))


def test_where_all_scores_are_minus_infinity_nothing_is_seen() -> None:
    query, key, value = torch.ones(9, 1, 8), torch.full((9, 1, 8), -torch.inf), states(9, 1)
    assert attend(query, key, value, packed_inputs(9)).isnan().all()


def test_subnormal_values_are_not_lost() -> None:
    query, key, value = (states(sum(LENGTHS), 2, seed=seed) for seed in range(3))
    ordinary = attend(query, key, value, packed_inputs(*LENGTHS))
    found = attend(query, key, value * 2.0**-130, packed_inputs(*LENGTHS))
    torch.testing.assert_close(found * 2.0**65 * 2.0**65, ordinary, atol=2.0**-12, rtol=0)  # 19 bits are left of them


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [0, 3, 0, 0, 17, 0]])
def test_texts_without_tokens_are_no_work(lengths: list[int]) -> None:
    check(*(states(sum(lengths), 2, seed=seed) for seed in range(3)), unchecked_inputs(*lengths))


def test_only_the_rows_of_the_texts_that_are_meant_are_written() -> None:
    inputs = packed_inputs(*LENGTHS)
    query, key, value = (states(sum(LENGTHS), 2, seed=seed) for seed in range(3))
    output = torch.full_like(query, 99)
    kernel().attend_to_texts(States(query, key, value, output), inputs, slice(2, 5), 0.3, FULL)
    start, stop = inputs.offsets[2], inputs.offsets[5]
    assert output[start:stop].flatten(1).equal(attend(query, key, value, inputs)[start:stop])
    assert (output[:start] == 99).all()
    assert (output[stop:] == 99).all()
