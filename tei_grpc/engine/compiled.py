"""Owns the encoder as torch.compile makes it, for batches of any size."""

from dataclasses import replace

import torch
from torch import Tensor

from tei_grpc.engine.graphs import TOLERANCE, Bucket, Encode, Place, difference, sample
from tei_grpc.errors import StartupError
from tei_grpc.layers.packed import PackedInputs

SHAPES = (Bucket(512, 9, 128), Bucket(1024, 33, 128))  # of the batches that it is proven with


class Compiled:
    """An encoder, compiled at its first batch, once for all numbers of texts and tokens."""

    def __init__(self, encode: Encode, vocabulary: int, backend: str = "inductor") -> None:
        self._encode = encode
        self._compiled: Encode = torch.compile(encode, dynamic=True, backend=backend)
        self._vocabulary = vocabulary

    def __call__(self, inputs: PackedInputs) -> Tensor:
        """[tokens] -> [tokens, hidden]. What lies on the host would be fixed in the code, so it is not there."""
        return self._compiled(replace(inputs, offsets=(), groups=()))

    def prove(self, place: Place, longest: int) -> None:
        """Compile now. Raises StartupError where that fails, or gives other numbers."""
        for seed, shape in enumerate(SHAPES):
            batch = sample(_with_texts_of(longest, shape), self._vocabulary, seed)
            try:
                apart = difference(self(place(batch, ())), self._encode(place(batch, ())))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler meets
                reason = f"{type(error).__name__}: {error}"
                raise StartupError(f"`--torch-compile`: this model cannot be compiled here: {reason}") from error
            if not apart <= TOLERANCE:
                raise StartupError(f"`--torch-compile`: the compiled model is {apart:.2g} off; leave the option out")


def _with_texts_of(longest: int, shape: Bucket) -> Bucket:
    """The shape with texts of at most `longest` tokens, and then so many that they fill it."""
    longest = min(longest, shape.longest)
    return Bucket(shape.tokens, max(shape.texts, shape.tokens // longest + 1), longest)
