"""What the client returns and takes, beside numpy arrays and text."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
TruncationDirection: TypeAlias = Literal["right", "left"]  # the end of a too long input that is cut
Pair: TypeAlias = tuple[str, str]


class SparseVector(NamedTuple):
    """The non-zero entries of a vector over the vocabulary."""

    indices: NDArray[np.uint32]  # [entries], token ids, ascending
    values: Floats  # [entries]


@dataclass(frozen=True)
class Rank:
    """The score of one text, by its position in the request."""

    index: int
    score: float
    text: str | None  # only with `return_text`


class Prediction(NamedTuple):
    """The score of one label."""

    label: str
    score: float


class Token(NamedTuple):
    """One token; `start` and `stop` are UTF-8 byte offsets into the encoded text, None for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True)
class ServerInfo:
    """What is being served, and within which limits; None where the server does not say."""

    version: str
    sha: str | None
    docker_label: str | None
    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: Literal["embedding", "classifier", "reranker"]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    tokenization_workers: int
