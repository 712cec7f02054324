"""Owns bge-m3's heads on token vectors: lexical weights for EmbedSparse, ColBERT vectors for EmbedAll.

Source of both: Chen et al., "BGE M3-Embedding", 2024, https://arxiv.org/abs/2402.03216, section 3.2.
"""

from collections.abc import Set
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tei_grpc.layers.linear import Linear
from tei_grpc.loading.weights import CheckpointFile, Names, load_weights
from tei_grpc.types import Floats, Ints


def load_linear(file: Path, in_features: int, out_features: int | None = None) -> Linear:
    """The layer in `file`, float32; without `out_features` it has as many as the file says. Raises StartupError."""
    checkpoint = CheckpointFile(file)
    if out_features is None:
        weight = next((read(name) for name, read in checkpoint.tensors() if name == "weight"), None)
        out_features = in_features if weight is None or not weight.dim() else len(weight)
    with torch.device("meta"):
        linear = Linear(in_features, out_features)
    load_weights(linear, checkpoint, Names(), dtype=torch.float32)
    return linear


class LexicalHead(nn.Module):
    """relu(w h + b), a weight for every token."""

    def __init__(self, file: Path, hidden: int) -> None:
        super().__init__()
        self.linear = load_linear(file, hidden, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens], float32."""
        weights: Tensor = self.linear(hidden.float())
        return weights.relu_()[:, 0]


class ColbertHead(nn.Module):
    """W h + b of every token, each vector of unit length. That of a text's first token is no part of the answer."""

    def __init__(self, file: Path, hidden: int) -> None:
        super().__init__()
        self.linear = load_linear(file, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, dimension], float32."""
        return functional.normalize(self.linear(hidden.float()), dim=-1)


def strongest(input_ids: Ints, weights: Floats, dropped: Set[int]) -> tuple[NDArray[np.uint32], Floats]:
    """The largest weight of each token id, ids ascending, without weights of zero and ids that are `dropped`."""
    ids, places = np.unique(input_ids, return_inverse=True)
    peaks = np.zeros(len(ids), np.float32)
    np.maximum.at(peaks, places, weights)
    kept = (peaks > 0) & ~np.isin(ids, list(dropped))
    return ids[kept].astype(np.uint32), peaks[kept]
