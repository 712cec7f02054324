"""Owns what attention runs on, on a CPU: a compiled kernel where that is right and faster, else products in blocks.

A kernel is compiled, proven and measured when the first call of its kind comes, which is at warm-up.
"""

import logging
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tei_grpc.layers.attention import FULL, Mask, States, attend_in_blocks, attend_to_group
from tei_grpc.layers.kernels import SAMPLE_LENGTHS, Call, sample
from tei_grpc.layers.packed import Group, PackedInputs
from tei_grpc.layers.precision import is_widening

if TYPE_CHECKING:
    from tei_grpc.layers.simd_attention import SimdAttention

logger = logging.getLogger(__name__)

COMPILED, BLOCKS = "compiled", "blocks"
CPU = torch.device("cpu")
WINDOW = Mask(left=9, right=20)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # values are about 1
ROUNDS = 3
LONG = 1024  # tokens from which blocks may be faster: with products in bfloat16, where the CPU has them, they are

_finding = threading.Lock()  # two threads may have the first call of a kind at the same time


class Found(NamedTuple):
    """A kernel, and from how many tokens of a text on blocks are faster."""

    kernel: "SimdAttention"
    blocks_from: int


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """Attention on a CPU. See `attention.attention`."""

    names: dict[str, None] = field(default_factory=dict)  # of what it has run on, in order

    def __call__(
        self, query: Tensor, key_value: tuple[Tensor, Tensor], inputs: PackedInputs, *, scale: float, mask: Mask
    ) -> Tensor:
        """See `attention.attention`."""
        found = None
        if mask.bias is None and not is_widening():  # an input that is run again is too rare to compile a kernel for
            found = find_kernel(query.dtype, query.shape[2], is_windowed=mask.is_windowed)
        if found is None:
            self.names[BLOCKS] = None
            return attend_in_blocks(query, key_value, inputs, scale=scale, mask=mask)
        self.names[COMPILED] = None
        if inputs.max_seqlen < found.blocks_from:
            return found.kernel(query, key_value, inputs, scale=scale, mask=mask)
        self.names[BLOCKS] = None
        return _attend_by_length(found, Call(query, key_value, inputs, scale, mask))


def _attend_by_length(found: Found, call: Call) -> Tensor:
    """Short texts by the kernel, long ones in blocks."""
    states = States(call.query, *call.key_value, torch.empty(call.query.shape, dtype=call.query.dtype))
    for is_long, run in groupby(call.inputs.groups, key=lambda group: group.length >= found.blocks_from):
        groups = list(run)
        if is_long:
            for group in groups:
                attend_to_group(states, group, call.scale, call.mask)
        else:
            found.kernel.attend_to_texts(states, call.inputs, _texts(call.inputs, groups), call.scale, call.mask)
    return states.output.flatten(1)


def _texts(inputs: PackedInputs, groups: Sequence[Group]) -> slice:
    """Those of groups that lie side by side, with the texts without tokens between them."""
    first, stop = groups[0].start, groups[-1].stop
    return slice(bisect_right(inputs.offsets, first) - 1, bisect_left(inputs.offsets, stop))


def find_kernel(dtype: torch.dtype, head_dim: int, *, is_windowed: bool) -> Found | None:
    """The compiled kernel for such states; None where there is none, or blocks are faster."""
    with _finding:
        return _find_kernel(dtype, head_dim, is_windowed)


@cache
def _find_kernel(dtype: torch.dtype, head_dim: int, is_windowed: bool) -> Found | None:
    try:
        from tei_grpc.layers.simd_attention import SimdAttention, takes  # they bring LLVM, which a GPU does without

        if not takes(dtype, head_dim):
            return None
        kernel = SimdAttention(dtype, head_dim, is_windowed=is_windowed)
    except (AttributeError, ImportError, OSError, RuntimeError) as error:  # another LLVM, another CPU, no OpenMP
        logger.warning("attention is not compiled for this CPU: %s", error)
        return None
    mask = WINDOW if is_windowed else FULL
    call, long_call = (sample(CPU, dtype, head_dim, x)._replace(mask=mask) for x in (SAMPLE_LENGTHS, (LONG,)))
    is_used = _is_right(kernel, call) and _is_faster(kernel, call)
    logger.info("attention in %s, heads of %d: %s", dtype, head_dim, COMPILED if is_used else BLOCKS)
    if not is_used:
        return None
    return Found(kernel, sys.maxsize if _is_faster(kernel, long_call) else LONG)


def _is_right(kernel: "SimdAttention", call: Call) -> bool:
    apart = (call.to(kernel).float() - call.to(attend_in_blocks).float()).abs().max()
    return bool(apart <= TOLERANCES[call.query.dtype])


def _is_faster(kernel: "SimdAttention", call: Call) -> bool:
    return _seconds(kernel, call) < _seconds(attend_in_blocks, call)


def _seconds(attend: Callable[..., Tensor], call: Call) -> float:
    """The least CPU time of some rounds: another process's burst of work decides nothing."""
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        call.to(attend)
        times.append(time.process_time() - started)
    return min(times)
