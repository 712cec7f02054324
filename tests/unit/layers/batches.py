"""Packed inputs for the tests of this directory."""

import numpy as np
import torch

from tei_grpc.engine.batch import pack
from tei_grpc.layers.packed import PackedInputs, place
from tei_grpc.types import Batch, Entry, Kind


def packed_inputs(*lengths: int) -> PackedInputs:
    """Texts of these lengths; every token has an id of its own."""
    starts = np.cumsum([0, *lengths])
    entries = [
        Entry(i, Kind.EMBED, np.arange(starts[i], starts[i] + length, dtype=np.int32))
        for i, length in enumerate(lengths)
    ]
    return place(pack(entries), torch.device("cpu"))


def unchecked_inputs(*lengths: int) -> PackedInputs:
    """The same, where there may be no texts, or texts without tokens, which no caller can send; all ids are 0."""
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    ids = np.zeros(bounds[-1], np.int32)
    return place(Batch((), ids, ids, ids, bounds, max(lengths, default=0)), torch.device("cpu"))
