"""Owns attention over packed texts on a CPU by a compiled kernel (see `attention_kernel`), in torch's threads."""

import ctypes
from typing import Final, NamedTuple

import torch
from torch import Tensor

from tei_grpc.layers.attention import Mask, States
from tei_grpc.layers.attention_kernel import QUERIES, Kernel, Slot
from tei_grpc.layers.native import call, float_bits
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.simd import ELEMENTS, LEAST_LANES, MOST_LANES

TAKES: Final = 16  # for each thread: how often it takes texts and heads, where there are enough
FAR: Final = 1 << 30  # tokens: a window without an end
SHARED_SCORES: Final = 1 << 12  # of a head, from which to wake other threads pays


class Arguments(NamedTuple):
    """What the kernel is called with, and in how many threads."""

    numbers: ctypes.Array[ctypes.c_int64]  # by `Slot`
    threads: int
    scratch: Tensor  # which the numbers point to


class SimdAttention:
    """A compiled kernel."""

    def __init__(self, dtype: torch.dtype, head_dim: int, *, is_windowed: bool) -> None:
        name = str(dtype).removeprefix("torch.")
        self.address = Kernel(name, head_dim, is_windowed=is_windowed).compile()

    def __call__(
        self, query: Tensor, key_value: tuple[Tensor, Tensor], inputs: PackedInputs, *, scale: float, mask: Mask
    ) -> Tensor:
        """See `attention.attention`."""
        states = States(query, *key_value, torch.empty(query.shape, dtype=query.dtype))
        self.attend_to_texts(states, inputs, slice(0, len(inputs.offsets) - 1), scale, mask)
        return states.output.flatten(1)

    def attend_to_texts(self, states: States, inputs: PackedInputs, texts: slice, scale: float, mask: Mask) -> None:
        """Write the output of these texts' rows; `states` are those of all rows."""
        query, key, value = map(_in_rows, (states.query, states.key, states.value))
        states = States(query, key, value, states.output)
        arguments = self.arguments(states, inputs, texts, scale, mask)
        call(self.address, arguments.numbers, arguments.threads)

    def arguments(self, states: States, inputs: PackedInputs, texts: slice, scale: float, mask: Mask) -> Arguments:
        """For states that have the values of a head side by side. Addresses of meta tensors are offsets."""
        query, key = states.query, states.key
        tensors = query, key, states.value, states.output
        tokens = inputs.offsets[texts.stop] - inputs.offsets[texts.start]
        threads = _threads(tokens, inputs.max_seqlen)
        size = _scratch_size(inputs.max_seqlen, query.shape[2])
        heads, scratch = key.shape[1], torch.empty(threads * size)
        items = heads * (texts.stop - texts.start)
        numbers = (ctypes.c_int64 * len(Slot))(
            *(tensor.data_ptr() for tensor in tensors),
            inputs.cu_seqlens[texts.start :].data_ptr(),
            items,
            heads,
            query.shape[1] // heads,
            *(step for tensor in tensors for step in tensor.stride()[:2]),
            FAR if mask.left is None else mask.left,
            FAR if mask.right is None else mask.right,
            float_bits(scale),
            scratch.data_ptr(),
            size,
            items if threads == 1 else max(1, items // (TAKES * threads)),
        )
        return Arguments(numbers, threads, scratch)


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a kernel for such states."""
    return str(dtype).removeprefix("torch.") in ELEMENTS and head_dim % LEAST_LANES == 0


def _in_rows(states: Tensor) -> Tensor:
    """With the values of a head side by side."""
    return states if states.stride(2) == 1 else states.contiguous()


def _threads(tokens: int, longest: int) -> int:
    return 1 if tokens * longest < SHARED_SCORES else torch.get_num_threads()


def _scratch_size(longest: int, head_dim: int) -> int:
    """Floats of a thread: keys, and for the queries of a tile their scores and they themselves."""
    padded = -(-longest // MOST_LANES) * MOST_LANES
    return padded * (head_dim + QUERIES[0]) + QUERIES[0] * head_dim
