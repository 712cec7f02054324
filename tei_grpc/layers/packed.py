"""Owns the torch view of a batch: packed tensors, and every index that attention and pooling need, computed once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tei_grpc.types import Batch

if TYPE_CHECKING:
    from tei_grpc.layers.attention import Mask

Indices = NDArray[np.int64]


class Attend(Protocol):
    """A way to compute what `attention.attention` promises."""

    def __call__(
        self, query: Tensor, key_value: tuple[Tensor, Tensor], inputs: "PackedInputs", *, scale: float, mask: "Mask"
    ) -> Tensor:
        """See `attention.attention`."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """Texts of equal length that lie side by side, so that their rows have the shape [texts, length] as they are."""

    start: int  # packed row of the first text
    texts: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last packed row."""
        return self.start + self.texts * self.length


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Sequences laid end to end, and where they lie. Everything below works on [tokens, hidden]."""

    input_ids: Tensor  # [tokens] int64
    position_ids: Tensor  # [tokens] int64, restarting at 0 with each text
    token_type_ids: Tensor  # [tokens] int64
    cu_seqlens: Tensor  # [texts + 1] int32, starts with 0
    max_seqlen: int
    offsets: tuple[int, ...]  # cu_seqlens on the host
    text_ids: Tensor  # [tokens] int64, which text a token belongs to
    groups: tuple[Group, ...]  # all texts, in order; the fewer, the faster: a batch is best sorted by length
    attend: Attend | None = None  # the device's own kernels; None: in blocks, as on a CPU

    @property
    def first_rows(self) -> Tensor:
        """The row of each text's first token, [texts]."""
        return self.cu_seqlens[:-1]


def place(batch: Batch, device: torch.device, *, rounded: bool = False) -> PackedInputs:
    """Put a batch on the device and add the indices that its layers share.

    `rounded` adds texts of one token each, behind all others, until there are `rounded_rows` tokens.
    """
    offsets = np.asarray(batch.cu_seqlens, dtype=np.int64)
    added = rounded_rows(int(offsets[-1])) - int(offsets[-1]) if rounded else 0
    offsets = np.concatenate([offsets, offsets[-1] + np.arange(1, added + 1)])
    lengths = np.diff(offsets)
    return PackedInputs(
        input_ids=_tensor(batch.input_ids, device, added),
        position_ids=_tensor(batch.position_ids, device, added),
        token_type_ids=_tensor(batch.token_type_ids, device, added),
        cu_seqlens=_tensor(offsets, device).int(),
        max_seqlen=batch.max_seqlen,
        offsets=tuple(offsets.tolist()),
        text_ids=_tensor(np.repeat(np.arange(len(lengths)), lengths), device),
        groups=tuple(_groups(offsets, lengths)),
    )


def rounded_rows(tokens: int) -> int:
    """The next multiple of 8, or of an eighth of the power of two below `tokens`.

    oneDNN prepares a kernel, and keeps about a megabyte, for every number of rows that a product has: so there are at
    most eight to an octave.
    """
    step = max(8, (1 << (tokens.bit_length() - 1)) // 8)
    return -(-tokens // step) * step


def _tensor(values: Sequence[int] | NDArray[np.integer], device: torch.device, zeros: int = 0) -> Tensor:
    padded = np.zeros(len(values) + zeros, np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded).to(device)


def _groups(offsets: Indices, lengths: Indices) -> Iterator[Group]:
    firsts = np.flatnonzero(np.diff(lengths, prepend=0)).tolist()
    for first, stop in pairwise([*firsts, len(lengths)]):
        yield Group(int(offsets[first]), stop - first, int(lengths[first]))
