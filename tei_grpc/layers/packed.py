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


def place(
    batch: Batch, device: torch.device, *, blank: Sequence[int] = (), attend: Attend | None = None
) -> PackedInputs:
    """Put a batch on the device and add the indices that its layers share.

    `blank` are the lengths of texts of zeros to put behind all others; `attend` are the device's own kernels.
    """
    texts = len(batch.cu_seqlens) - 1 + len(blank)
    lengths = np.empty(texts, np.int64)
    lengths[: texts - len(blank)] = np.diff(batch.cu_seqlens)
    lengths[texts - len(blank) :] = blank
    tokens = int(lengths.sum())
    host = np.zeros(4 * tokens + texts + 1, np.int64)  # all at once: to copy one array to a device takes least time
    ids, offsets = host[: 4 * tokens].reshape(4, tokens), host[4 * tokens :]
    taken = len(batch.input_ids)
    ids[0, :taken], ids[1, :taken], ids[2, :taken] = batch.input_ids, batch.position_ids, batch.token_type_ids
    ids[3] = np.repeat(np.arange(texts), lengths)
    np.cumsum(lengths, out=offsets[1:])
    placed = send(torch.from_numpy(host), device)
    input_ids, position_ids, token_type_ids, text_ids = placed[: 4 * tokens].view(4, tokens).unbind()
    return PackedInputs(
        input_ids=input_ids,
        position_ids=position_ids,
        token_type_ids=token_type_ids,
        cu_seqlens=placed[4 * tokens :].int(),
        max_seqlen=max(batch.max_seqlen, *blank, 0),
        offsets=tuple(offsets.tolist()),
        text_ids=text_ids,
        groups=tuple(_groups(offsets, lengths)),
        attend=attend,
    )


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """The values as a tensor, int64, on the device (see `send`)."""
    return send(torch.tensor(values, dtype=torch.int64), device)


def send(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU, on the device; on the way to a CUDA device nobody waits for what it is doing."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def rounded_rows(tokens: int) -> int:
    """The next multiple of 8, or of an eighth of the power of two below `tokens`; just above that, of a 32nd of it.

    oneDNN prepares a kernel, and keeps about a megabyte, for every number of rows that a product has: so there are at
    most nine to an octave. The halves of full batches are about a power of two, so that one counts most.
    """
    octave = 1 << (tokens.bit_length() - 1)
    above = max(8, octave // 32)
    step = above if tokens <= octave + above else max(8, octave // 8)
    return -(-tokens // step) * step


def _groups(offsets: Indices, lengths: Indices) -> Iterator[Group]:
    firsts = np.flatnonzero(np.diff(lengths, prepend=0)).tolist()
    for first, stop in pairwise([*firsts, len(lengths)]):
        if lengths[first]:
            yield Group(int(offsets[first]), stop - first, int(lengths[first]))
