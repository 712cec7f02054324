"""Owns the last step of loading: the model's layers laid out for this machine, in floats or in int8."""

import logging
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tei_grpc.engine.batch import pack
from tei_grpc.layers import int8
from tei_grpc.layers.experts import ExpertMLP
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import place
from tei_grpc.layers.precision import Float32
from tei_grpc.models import Model
from tei_grpc.types import Entry, Kind

logger = logging.getLogger(__name__)

SAMPLE_LENGTHS = (8, 32, 128)  # tokens
LEAST_COSINE = 0.99  # mean, of token vectors; below it a warning says so


def prepare(model: Model) -> None:
    """Lay every linear layer out for this machine, in the dtype it has."""
    for module in _layers(model):
        module.prepare()


def quantize(model: Model, vocabulary: int, longest: int) -> None:
    """Turn the linear layers of a loaded model into int8, one after the other, each weight in floats then freed.

    Logs how near the token vectors of some random ids stay to those of the weights before, computed in float32.
    """
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, vocabulary, min(length, longest), np.int32) for length in SAMPLE_LENGTHS]
    with torch.inference_mode():
        with Float32():
            expected = _token_vectors(model, texts)
        for module in _layers(model):
            module.prepare(int8.prepack)
        cosine = float(functional.cosine_similarity(_token_vectors(model, texts), expected, dim=-1).mean())
    level = logging.INFO if cosine >= LEAST_COSINE else logging.WARNING
    logger.log(level, "int8: mean cosine %.4f to float32, over %d token vectors of random ids", cosine, len(expected))


def _layers(model: Model) -> Iterable[Linear | ExpertMLP]:
    return (module for module in model.modules() if isinstance(module, Linear | ExpertMLP))


def _token_vectors(model: Model, texts: list[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> Tensor:
    batch = pack([Entry(row, Kind.EMBED_ALL, text) for row, text in enumerate(texts)])
    return model.encode(place(batch, torch.device("cpu"))).float()
