"""Packed inputs for the tests of this directory."""

import numpy as np
import torch

from tei_grpc.engine.batch import pack
from tei_grpc.layers.packed import PackedInputs, place
from tei_grpc.types import Entry, Kind


def packed_inputs(*lengths: int) -> PackedInputs:
    """Texts of these lengths; every token has an id of its own."""
    starts = np.cumsum([0, *lengths])
    entries = [
        Entry(i, Kind.EMBED, np.arange(starts[i], starts[i] + length, dtype=np.int32))
        for i, length in enumerate(lengths)
    ]
    return place(pack(entries), torch.device("cpu"))
