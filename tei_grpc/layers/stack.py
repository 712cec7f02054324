"""Owns how post-norm layers run one after the other: on a CPU in one call of compiled code (see `stack_code`).

Layer by layer, Python takes the interpreter's lock some hundred times a batch, and waits for it wherever the event loop
has it. The code calls what the layers call, so the numbers are the same to the bit; it is proven with the first batch,
which is at warm-up, and where it is not to be had the layers run as they are.
"""

import logging
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from tei_grpc.layers.cpu_kernels import CpuKernels
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.precision import is_widening

if TYPE_CHECKING:
    from tei_grpc.layers.compiled_stack import CompiledStack

logger = logging.getLogger(__name__)

_proving = threading.Lock()  # two threads may have the first batches at the same time


class Parts(NamedTuple):
    """What a post-norm layer is made of."""

    qkv: Linear  # [hidden] -> queries, keys and values, [hidden] each
    out: Linear
    attention_norm: nn.LayerNorm
    up: Linear
    down: Linear
    norm: nn.LayerNorm

    @property
    def products(self) -> tuple[Linear, ...]:
        """In the order in which they run."""
        return self.qkv, self.out, self.up, self.down

    @property
    def norms(self) -> tuple[nn.LayerNorm, ...]:
        """In the order in which they run."""
        return self.attention_norm, self.norm


class PostNormLayer(Protocol):
    """A module that is a layer: x = norm(x + out(attention(qkv(x)))), and then norm(x + down(up(x)))."""

    @property
    def parts(self) -> Parts:
        """What it is made of."""
        ...

    def __call__(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        ...


class PostNormStack(nn.Module):
    """Layers one after the other, in which every query sees all keys of its text, and no bias is added to scores."""

    def __init__(self, layers: Iterable[nn.Module], heads: int) -> None:
        """Each of the layers is a PostNormLayer."""
        super().__init__()
        self.layer = nn.ModuleList(layers)
        self._heads = heads
        self._is_tried = False  # to compile them
        self._is_proven = False
        self._compiled: CompiledStack | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether the layers run in one call, as far as batches have met it."""
        return self._is_proven and self._compiled is not None

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; `x` is not to be used any more."""
        compiled = self._find(x, inputs)
        return self._run_layers(x, inputs) if compiled is None else compiled(x, inputs)

    def _run_layers(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        for layer in self.layer:
            x = layer(x, inputs)
        return x

    def _find(self, x: Tensor, inputs: PackedInputs) -> "CompiledStack | None":
        """Not within a `Float32`, whose products are others, nor for texts whose attention runs in blocks."""
        if not isinstance(inputs.attend, CpuKernels) or is_widening() or not x.is_contiguous():
            return None
        if not self._is_tried:
            with _proving:
                if not self._is_tried:
                    self._compiled, self._is_tried = self._compile(x), True
        compiled = self._compiled
        if compiled is None or not compiled.takes(x, inputs):
            return None
        if not self._is_proven:
            with _proving:
                if not self._is_proven:
                    self._prove(compiled, x, inputs)
        return self._compiled

    def _prove(self, compiled: "CompiledStack", x: Tensor, inputs: PackedInputs) -> None:
        expected = self._run_layers(x.clone(), inputs)
        try:
            if not torch.equal(compiled(x.clone(), inputs), expected):
                raise RuntimeError("they give other numbers")
        except RuntimeError as error:
            logger.warning("compiled layers are not used, the layers run one by one: %s", error)
            self._compiled = None
        self._is_proven = True

    def _compile(self, x: Tensor) -> "CompiledStack | None":
        parts = [cast(PostNormLayer, layer).parts for layer in self.layer]
        try:
            from tei_grpc.layers.compiled_stack import CompiledStack  # brings LLVM, which other devices do without

            return CompiledStack(x, parts, self._heads)
        except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
            logger.info("the layers run one by one: %s", error)
            return None
