"""What attention on a CPU runs on: a compiled kernel only where it is right and faster."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tei_grpc.layers import cpu_kernels as module
from tei_grpc.layers import simd, simd_attention
from tei_grpc.layers.attention import FULL, Mask, attend_in_blocks
from tei_grpc.layers.bias import alibi_bias
from tei_grpc.layers.cpu_kernels import BLOCKS, COMPILED, CpuKernels, Found, find_kernel
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.simd_attention import SimdAttention
from tests.unit.layers.batches import packed_inputs, unchecked_inputs
from tests.unit.layers.literal import literal_attention
from tests.unit.layers.masks import LENGTHS, TOKENS, states


@pytest.fixture(autouse=True)
def _nothing_found_yet():
    module._find_kernel.cache_clear()
    yield
    module._find_kernel.cache_clear()


@pytest.fixture
def _compiled_is_faster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_seconds", lambda attend, call: 2.0 if attend is attend_in_blocks else 1.0)


def attend(kernels: CpuKernels, inputs: PackedInputs, mask: Mask = FULL, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """What they give, and the definition."""
    rows = inputs.offsets[-1]
    query, key, value = (
        torch.randn(rows, 12, 8, generator=torch.Generator().manual_seed(0)).to(dtype).tensor_split(3, 1)
    )
    found = kernels(query, (key, value), inputs, scale=0.3, mask=mask)
    return found, literal_attention(query, (key, value), inputs, scale=0.3, mask=mask)


@pytest.mark.usefixtures("_compiled_is_faster")
@pytest.mark.parametrize("mask", [FULL, Mask(left=3, right=1)])
def test_a_right_and_faster_kernel_is_used(mask: Mask) -> None:
    kernels = CpuKernels()
    torch.testing.assert_close(*attend(kernels, packed_inputs(*LENGTHS), mask))
    assert list(kernels.names) == [COMPILED]


@pytest.mark.usefixtures("_compiled_is_faster")
@pytest.mark.parametrize("wrong", [1.001, torch.nan])
def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    right = SimdAttention.__call__
    monkeypatch.setattr(SimdAttention, "__call__", lambda *args, **options: right(*args, **options) * wrong)
    kernels = CpuKernels()
    torch.testing.assert_close(*attend(kernels, packed_inputs(*LENGTHS)))
    assert list(kernels.names) == [BLOCKS]


def test_a_slower_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_seconds", lambda attend, call: 1.0 if attend is attend_in_blocks else 2.0)
    kernels = CpuKernels()
    torch.testing.assert_close(*attend(kernels, packed_inputs(*LENGTHS)))
    assert list(kernels.names) == [BLOCKS]


@pytest.mark.usefixtures("_compiled_is_faster")
def test_a_bias_is_added_in_blocks() -> None:
    kernels, inputs = CpuKernels(), packed_inputs(*LENGTHS)
    torch.testing.assert_close(*attend(kernels, inputs, Mask(bias=alibi_bias(4, inputs))))
    assert list(kernels.names) == [BLOCKS]


@pytest.mark.usefixtures("_compiled_is_faster")
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float64, 8), (torch.float32, 12)])
def test_what_there_is_no_kernel_for_runs_in_blocks(dtype: torch.dtype, head_dim: int) -> None:
    assert find_kernel(dtype, head_dim, is_windowed=False) is None


def where_blocks_win_from(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """On such a CPU: the sample that decides has one text of that length."""

    def seconds(attend, call) -> float:
        return 1.0 if (attend is attend_in_blocks) == (call.inputs.offsets == (0, length)) else 2.0

    monkeypatch.setattr(module, "LONG", length)
    monkeypatch.setattr(module, "_seconds", seconds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(5, 30, 3, 30, 30, 7, 9), (30, 4), (30,), (4, 30), (1, 2, 3)])
def test_long_texts_run_in_blocks_beside_short_ones_that_do_not(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    where_blocks_win_from(monkeypatch, 30)
    kernels, inputs = CpuKernels(), packed_inputs(*lengths)
    found, expected = attend(kernels, inputs, dtype=dtype)
    close = {} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0}  # blocks round probabilities to 16 bits
    torch.testing.assert_close(found, expected, **close)
    assert list(kernels.names) == ([COMPILED, BLOCKS] if 30 in lengths else [COMPILED])


def test_texts_without_tokens_shift_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    where_blocks_win_from(monkeypatch, 30)
    for lengths in ((0, 5, 0, 30, 0, 0, 7, 0), (30, 0, 3), (0, 30)):
        torch.testing.assert_close(*attend(CpuKernels(), unchecked_inputs(*lengths)))


def test_a_long_text_gets_the_same_bits_alone_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    where_blocks_win_from(monkeypatch, 30)
    product = states(12, seed=0).bfloat16()
    parts = product.tensor_split(3, 1)
    together = CpuKernels()(parts[0], parts[1:], packed_inputs(*LENGTHS), scale=0.3, mask=FULL)
    start = TOKENS - LENGTHS[-1]
    query, key, value = (part[start:] for part in parts)
    alone = CpuKernels()(query, (key, value), packed_inputs(LENGTHS[-1]), scale=0.3, mask=FULL)
    assert together[start:].equal(alone)


@pytest.mark.parametrize("error", [RuntimeError("no such CPU"), OSError("libllvmlite.so: cannot open")])
def test_without_llvm_attention_runs_in_blocks_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(simd.Code, "finish", fail)
    kernels = CpuKernels()
    torch.testing.assert_close(*attend(kernels, packed_inputs(*LENGTHS)))
    assert list(kernels.names) == [BLOCKS]
    assert [str(error) in record.message for record in caplog.records if record.levelno == logging.WARNING] == [True]


@pytest.mark.usefixtures("_compiled_is_faster")
def test_threads_that_meet_a_kind_at_once_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    make = simd_attention.Kernel.compile
    monkeypatch.setattr(simd_attention.Kernel, "compile", lambda kernel: made.append(kernel) or make(kernel))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: find_kernel(torch.float32, 8, is_windowed=False), range(8)))
    assert len(made) == len(set(found)) == 1
    assert isinstance(found[0], Found)


@pytest.mark.parametrize("name", ["fma", "f16c"])
def test_cpu_without_an_instruction_that_kernels_need_runs_in_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """There a compiled kernel would call functions, or end the process."""
    features = simd.llvm.get_host_cpu_features()
    features[name] = False
    monkeypatch.setattr(simd.llvm, "get_host_cpu_features", lambda: features)
    module._find_kernel.cache_clear()
    try:
        assert find_kernel(torch.float32, 32, is_windowed=False) is None
    finally:
        module._find_kernel.cache_clear()
    assert f"it lacks {name}" in caplog.text
