"""Owns which kernels attention runs on, on a device that has more than one: chosen at load, and said in the log.

What flash attention takes goes there. The rest stays packed: flex_attention where it compiles, otherwise
scaled_dot_product_attention by groups of equal length. A kernel is proven before it is used: it must give, on the
device, what the last of these gives.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tei_grpc.layers import varlen
from tei_grpc.layers.attention import CAUSAL, FULL, Mask
from tei_grpc.layers.grouped import attend_by_group
from tei_grpc.layers.packed import Attend, PackedInputs, place
from tei_grpc.layers.varlen import Varlen
from tei_grpc.types import Batch

logger = logging.getLogger(__name__)

# Of the largest value: several roundings in bfloat16 and float16, and TF32 products for float32.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 2e-3}
SAMPLE_LENGTHS = (1, 70, 130, 300)  # tokens
SAMPLE_MASKS = (FULL, CAUSAL, Mask(left=20, right=0), Mask(left=9, right=9))
ROUNDS = 5
BY_GROUP = "scaled_dot_product_attention"


class Kernel(Attend, Protocol):
    """A way to compute attention, and what it is called."""

    @property
    def name(self) -> str:
        """As in the log."""
        ...


class Call(NamedTuple):
    """The arguments of `attention.attention`."""

    query: Tensor
    key_value: tuple[Tensor, Tensor]
    inputs: PackedInputs
    scale: float
    mask: Mask

    def to(self, attend: Attend) -> Tensor:
        """What `attend` makes of them."""
        return attend(self.query, self.key_value, self.inputs, scale=self.scale, mask=self.mask)


class Kind(NamedTuple):
    """What calls have in common that get the same kernel."""

    dtype: torch.dtype
    head_dim: int
    window: tuple[int | None, int | None]
    bias: type | None

    def __str__(self) -> str:
        bias = "" if self.bias is None else f", {self.bias.__name__}"
        return f"{self.dtype}, heads of {self.head_dim}, window {self.window}{bias}"


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a device, for a model in `dtype`. Each kind of call is given its own once, at warm-up."""

    dtype: torch.dtype
    flash: Varlen | None
    make_flex: Callable[[], Kernel]  # only when a model needs it: to compile takes long
    chosen: dict[Kind, Attend] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)  # of those chosen, in order

    def __call__(
        self, query: Tensor, key_value: tuple[Tensor, Tensor], inputs: PackedInputs, *, scale: float, mask: Mask
    ) -> Tensor:
        """See `attention.attention`."""
        bias = None if mask.bias is None else type(mask.bias)
        kind = Kind(query.dtype, query.shape[2], (mask.left, mask.right), bias)
        attend = self.chosen.get(kind) or self._choose(kind, Call(query, key_value, inputs, scale, mask))
        return attend(query, key_value, inputs, scale=scale, mask=mask)

    def _choose(self, kind: Kind, call: Call) -> Attend:
        name, attend = self._find(call)
        logger.info("attention (%s): %s", kind, name)
        self.chosen[kind] = attend
        self.names[name] = None
        return attend

    def _find(self, call: Call) -> tuple[str, Attend]:
        """A call in another dtype than the model's is a recovery: too rare to compile a kernel for."""
        if self.flash is not None and varlen.takes(call.query, call.mask) and _is_right_there(self.flash, call):
            return self.flash.name, self.flash
        if call.query.dtype == self.dtype:
            flex = self.make_flex()
            if is_right(flex, call):
                return flex.name, flex
        return BY_GROUP, attend_by_group


def choose_kernels(device: torch.device, dtype: torch.dtype, *, flash: bool) -> Kernels:
    """For a CUDA device. Without `flash` no flash-attention kernel is used."""
    usable = flash and dtype in varlen.DTYPES and torch.cuda.get_device_capability(device) >= varlen.CAPABILITY
    kernels = varlen.find_varlen() if usable else ()
    return Kernels(dtype, fastest(kernels, sample(device, dtype), cuda_seconds), _compiled_flex)


def _compiled_flex() -> Kernel:
    from tei_grpc.layers.flex import Flex, compiled  # brings torch's compiler along, which takes seconds to import

    return Flex(compiled())


def fastest(kernels: Iterable[Varlen], call: Call, seconds: Callable[[Callable[[], object]], float]) -> Varlen | None:
    """Of the kernels that are right under all masks without a bias the one that takes least time, if there is any.

    Of several ways to call the same one the first that is right counts.
    """
    right: dict[str, Varlen] = {}
    for kernel in kernels:
        if kernel.name not in right and _is_right_masked(kernel, call):
            right[kernel.name] = kernel
    if len(right) > 1:
        return min(right.values(), key=lambda kernel: seconds(lambda: call.to(kernel)))
    return next(iter(right.values()), None)


def _is_right_there(kernel: Kernel, call: Call) -> bool:
    """Whether it is for this call, and for all masks at its head size: each size is a kernel of its own."""
    query = call.query
    return is_right(kernel, call) and _is_right_masked(kernel, sample(query.device, query.dtype, query.shape[2]))


def _is_right_masked(kernel: Kernel, call: Call) -> bool:
    return all(is_right(kernel, call._replace(mask=mask)) for mask in SAMPLE_MASKS)


def is_right(kernel: Kernel, call: Call) -> bool:
    """Whether a kernel runs, and gives what attention is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compilers have much to say
            found, expected = call.to(kernel).float(), call.to(attend_by_group).float()
    except Exception as error:  # not built for this device, no compiler, another signature
        logger.info("%s does not run here: %s: %s", kernel.name, type(error).__name__, error)
        return False
    is_finite = expected.isfinite()  # 16 bits may be too small for what a model computes
    apart, largest = (torch.where(is_finite, x, 0).abs().max() for x in (found - expected, expected))
    return bool(apart <= TOLERANCES[call.query.dtype] * largest)


def sample(
    device: torch.device, dtype: torch.dtype, head_dim: int = 64, lengths: Sequence[int] = SAMPLE_LENGTHS
) -> Call:
    """Random texts of several lengths, each two heads of queries with one of keys and values."""
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    ids = np.zeros(bounds[-1], np.int32)
    inputs = place(Batch((), ids, ids, ids, bounds, max(lengths)), device)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(bounds[-1], 8, head_dim, generator=generator).to(device, dtype)
    return Call(states[:, :4], (states[:, 4:6], states[:, 6:]), inputs, head_dim**-0.5, FULL)


def cuda_seconds(run: Callable[[], object]) -> float:
    """The least time of some rounds."""
    times = []
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) / 1000)
    return min(times)
