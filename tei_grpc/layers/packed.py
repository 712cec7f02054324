"""Owns the torch view of a batch: packed tensors, and every index that attention and pooling need, computed once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tei_grpc.types import Batch

Indices = NDArray[np.int64]
MASKED = torch.finfo(torch.float32).min  # not -inf: a padding row that sees nothing must not become NaN


@dataclass(frozen=True, slots=True)
class Group:
    """Texts that attention handles together, because they are padded to the same length."""

    start: int  # first row of the group among all padded rows
    length: int  # padded length of each text
    rows: Tensor  # [texts, length] packed row of each padded position; padding repeats the text's own last row
    key_mask: Tensor  # [texts, 1, 1, length] float32, 0 for a token and MASKED for padding

    @property
    def texts(self) -> int:
        """Number of texts."""
        return self.rows.shape[0]

    @property
    def stop(self) -> int:
        """One past the group's last row among all padded rows."""
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
    groups: tuple[Group, ...]
    pad: Tensor  # [padded rows] int64, packed row of each padded row
    unpad: Tensor  # [tokens] int64, padded row of each packed row

    @property
    def first_rows(self) -> Tensor:
        """The row of each text's first token, [texts]."""
        return self.cu_seqlens[:-1]


def padded_length(length: int) -> int:
    """The length to which a text is padded inside attention.

    It depends on nothing but the text's own length, so batch mates cannot change a result: the next multiple of 8,
    or, for long texts, of a sixteenth of the next power of two, which bounds both the waste and the number of groups.
    """
    step = max(8, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


def place(batch: Batch, device: torch.device) -> PackedInputs:
    """Put a batch on the device and add the indices that its layers share."""
    offsets = np.asarray(batch.cu_seqlens, dtype=np.int64)
    lengths = np.diff(offsets)
    groups = _groups(offsets, lengths, device)
    pad = torch.cat([group.rows.flatten() for group in groups])
    return PackedInputs(
        input_ids=_tensor(batch.input_ids, device),
        position_ids=_tensor(batch.position_ids, device),
        token_type_ids=_tensor(batch.token_type_ids, device),
        cu_seqlens=_tensor(offsets, device).int(),
        max_seqlen=batch.max_seqlen,
        offsets=tuple(offsets.tolist()),
        text_ids=_tensor(np.repeat(np.arange(len(lengths)), lengths), device),
        groups=groups,
        pad=pad,
        unpad=_unpad(pad, groups, int(offsets[-1])),
    )


def _tensor(values: Sequence[int] | NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.tensor(np.asarray(values, dtype=np.int64), device=device)


def _groups(offsets: Indices, lengths: Indices, device: torch.device) -> tuple[Group, ...]:
    padded = np.array([padded_length(length) for length in lengths.tolist()])
    groups, start = [], 0
    for length in np.unique(padded).tolist():
        texts = np.flatnonzero(padded == length)
        group = _group(start, length, offsets[texts], lengths[texts])
        groups.append(Group(start, length, group.rows.to(device), group.key_mask.to(device)))
        start = group.stop
    return tuple(groups)


def _group(start: int, length: int, firsts: Indices, lengths: Indices) -> Group:
    positions = np.arange(length)
    rows = firsts[:, None] + np.minimum(positions, lengths[:, None] - 1)
    mask = np.where(positions < lengths[:, None], np.float32(0), np.float32(MASKED))
    return Group(start, length, torch.from_numpy(rows), torch.from_numpy(mask)[:, None, None, :])


def _unpad(pad: Tensor, groups: tuple[Group, ...], tokens: int) -> Tensor:
    real = torch.cat([(group.key_mask == 0).flatten() for group in groups]).nonzero().squeeze(1)
    unpad = torch.empty(tokens, dtype=torch.int64, device=pad.device)
    unpad[pad[real]] = real
    return unpad
