"""Layers that run in one call of compiled code: the same bits as one by one, wherever they may run so."""

import ctypes
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from torch import Tensor, nn

from tei_grpc.layers import compiled_products, compiled_stack, int8, onednn
from tei_grpc.layers.compiled_stack import CompiledStack
from tei_grpc.layers.cpu_kernels import CpuKernels, find_kernel
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.precision import Float32
from tei_grpc.layers.stack import PostNormStack
from tei_grpc.models import bert, distilbert
from tests.unit.layers.batches import packed_inputs

HIDDEN, WIDE, HEADS, LAYERS = 64, 96, 2, 3
LENGTHS = (1, 7, 33, 8, 9, 30, 2, 17)
BERT = {"hidden_size": HIDDEN, "intermediate_size": WIDE, "num_attention_heads": HEADS, "layer_norm_eps": 1e-5}
DISTILBERT = {"dim": HIDDEN, "hidden_dim": WIDE, "n_heads": HEADS, "n_layers": LAYERS}


def make(act: str = "gelu", family: str = "bert", dtype: torch.dtype = torch.float32) -> PostNormStack:
    """With random weights, laid out by oneDNN whether or not that is faster here."""
    torch.manual_seed(0)
    stack = (
        bert.Encoder({**BERT, "hidden_act": act, "num_hidden_layers": LAYERS})
        if family == "bert"
        else distilbert.Transformer({**DISTILBERT, "activation": act})
    )
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.1)
    return stack.to(dtype)


def prepared(stack: PostNormStack, prepack=onednn.Product) -> PostNormStack:
    for module in stack.modules():
        if isinstance(module, Linear):
            module.prepare(prepack)
    return stack


def states(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def batch(*lengths: int) -> PackedInputs:
    return replace(packed_inputs(*lengths), attend=CpuKernels())


def one_by_one(stack: PostNormStack, x: Tensor, inputs: PackedInputs) -> Tensor:
    for layer in stack.layer:
        x = layer(x, inputs)
    return x


def run(stack: PostNormStack, inputs: PackedInputs, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What the stack gives, and its layers one by one."""
    x = states(inputs.offsets[-1], dtype)
    with torch.inference_mode():
        return stack(x.clone(), inputs), one_by_one(stack, x.clone(), inputs)


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stack_gives_the_bits_of_its_layers(threads, dtype, act, family):
    stack = prepared(make(act, family, dtype))
    for lengths in (LENGTHS, (200, 3), (1,)):
        found, expected = run(stack, batch(*lengths), dtype)
        assert stack.is_compiled
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_stack_in_int8_gives_the_bits_of_its_layers(threads, family):
    stack = prepared(make(family=family, dtype=torch.bfloat16), int8.Product)
    for lengths in (LENGTHS, (200, 3), (1,)):
        found, expected = run(stack, batch(*lengths), torch.bfloat16)
        assert stack.is_compiled
        assert torch.equal(found, expected)


def test_stack_gives_what_the_definition_gives():
    stack, inputs = make(), packed_inputs(*LENGTHS)
    x = states(inputs.offsets[-1])
    expected = one_by_one(stack, x.clone(), inputs)  # torch's products, attention in blocks
    found, _ = run(prepared(stack), replace(inputs, attend=CpuKernels()))
    assert stack.is_compiled
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_text_gets_the_same_bits_beside_others():
    stack, lengths = prepared(make()), (5, 9, 2)
    x = states(sum(lengths))
    together = stack(x.clone(), batch(*lengths))
    assert torch.equal(stack(x[5:14].clone(), batch(9)), together[5:14])


@pytest.mark.parametrize(
    "make_stack",
    [lambda: prepared(make("silu")), make, lambda: make(dtype=torch.float16)],
    ids=["an activation that is no part of the product", "products of torch", "a dtype that oneDNN lacks"],
)
def test_layers_run_one_by_one_where_they_are_not_all_compiled(make_stack):
    stack = make_stack()
    dtype = stack.layer[0].output.LayerNorm.weight.dtype
    found, expected = run(stack, batch(*LENGTHS), dtype)
    assert not stack.is_compiled
    assert torch.equal(found, expected)


def test_stack_whose_layers_do_something_else_is_found_out(caplog):
    class Other(bert.Layer):
        def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
            return super().forward(x, inputs) * 1.0001

    config = {**BERT, "hidden_act": "gelu"}
    stack = PostNormStack([Other(config)], HEADS)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.1)
    found, expected = run(prepared(stack), batch(*LENGTHS))
    assert not stack.is_compiled
    assert torch.equal(found, expected)
    assert "other numbers" in caplog.text


def test_layers_run_one_by_one_where_torchs_product_gives_an_error(monkeypatch, caplog):
    fails = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 8)(lambda *_: 1)
    monkeypatch.setattr(compiled_products, "address_of", lambda _: ctypes.cast(fails, ctypes.c_void_p).value)
    stack = prepared(make())
    found, expected = run(stack, batch(*LENGTHS))
    assert not stack.is_compiled
    assert torch.equal(found, expected)
    assert "a product of a compiled layer failed" in caplog.text


def test_text_whose_attention_runs_in_blocks_leaves_the_proof_to_others(monkeypatch):
    kernel = find_kernel(torch.float32, HIDDEN // HEADS, is_windowed=False)
    monkeypatch.setattr(compiled_stack, "find_kernel", lambda *_, **__: kernel._replace(blocks_from=30))
    stack = prepared(make())
    compiled = []
    for length, is_compiled in ((30, False), (31, False), (29, True), (30, True)):
        found, expected = run(stack, batch(length))
        assert torch.equal(found, expected)
        assert stack.is_compiled is is_compiled
        compiled.append(stack._compiled)
    assert len(set(map(id, compiled))) == 1


def test_handles_are_freed_with_their_owner_but_not_at_the_end_of_a_process_whose_batches_may_still_run():
    code = (
        "from tei_grpc.layers import c_interface as c; c._delete = lambda numbers: print(numbers); "
        "kept, gone = c.Handles(), c.Handles(); gone._numbers.append(7); del gone"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "[7]\n"


def test_recovery_in_float32_runs_layer_by_layer():
    stack, inputs = prepared(make(dtype=torch.bfloat16)), batch(*LENGTHS)
    run(stack, inputs, torch.bfloat16)
    assert stack.is_compiled
    with torch.inference_mode(), Float32():
        wide = stack(states(inputs.offsets[-1], torch.bfloat16), inputs)
    assert wide.dtype == torch.float32


def test_failure_of_a_product_is_an_error():
    other = Linear(WIDE + 32, HIDDEN)  # which does not fit the product before it
    nn.init.normal_(other.weight)
    other.prepare(onednn.Product)
    parts = [layer.parts for layer in prepared(make()).layer]
    x, inputs = states(5), batch(5)
    compiled = CompiledStack(x, [*parts[:-1], parts[-1]._replace(down=other)], HEADS)
    with pytest.raises(RuntimeError, match="a product of a compiled layer failed"):
        compiled(x, inputs)


def test_batches_leave_no_memory_behind():
    stack, inputs = prepared(make()), batch(*[128] * 8)
    run(stack, inputs)
    before = psutil.Process().memory_info().rss
    for _ in range(300):  # of 2 MB each, in states and products
        run(stack, inputs)
    assert psutil.Process().memory_info().rss - before < 64 << 20
