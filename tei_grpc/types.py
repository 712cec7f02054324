"""The nouns that travel the line: input, encoding, entry, batch, output, metadata, and what callers get back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Arrays = tuple[NDArray[Any], ...]


class ModelType(StrEnum):
    """What the model is for, as `Info` reports it."""

    EMBEDDING = "embedding"
    CLASSIFIER = "classifier"
    RERANKER = "reranker"


class Pooling(StrEnum):
    """How token vectors become one vector."""

    CLS = "cls"
    MEAN = "mean"
    LAST_TOKEN = "last-token"  # noqa: S105
    SPLADE = "splade"
    MAX = "max"
    MEAN_SQRT_LEN = "mean-sqrt-len"
    WEIGHTED_MEAN = "weighted-mean"


class Kind(StrEnum):
    """What an entry wants from the model."""

    EMBED = "embed"
    EMBED_ALL = "embed_all"
    EMBED_SPARSE = "embed_sparse"
    PREDICT = "predict"


class State(StrEnum):
    """Life of an engine."""

    LOADING = "loading"
    SERVING = "serving"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"


class TruncationDirection(StrEnum):
    """Which end of a too long input is cut: RIGHT keeps the head, LEFT the tail."""

    RIGHT = "right"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Input:
    """What the caller sent: a text, or a pair of texts."""

    text: str
    pair: str | None = None
    truncate: bool = False
    truncation_direction: TruncationDirection = TruncationDirection.RIGHT
    prompt_name: str | None = None

    @property
    def chars(self) -> int:
        """Unicode scalar values of the caller's own text, prompt excluded."""
        return len(self.text) + len(self.pair or "")


@dataclass(frozen=True, slots=True)
class Caller:
    """How the caller waits: for a permit or not, and until when (CLOCK_MONOTONIC, ns); and how to find the call again.

    `traceparent` and `tracestate` are the caller's W3C trace context, as it came.
    """

    waits: bool = False
    deadline_ns: int | None = None
    request_id: str = ""
    traceparent: str | None = None
    tracestate: str | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How Predict and Rerank treat their texts and logits."""

    truncate: bool = False
    truncation_direction: TruncationDirection = TruncationDirection.RIGHT
    raw_scores: bool = False


@dataclass(frozen=True, slots=True)
class Encoding:
    """An input as the model sees it. `token_type_ids` is None when they are all zero."""

    input_ids: Ints  # [length]
    token_type_ids: Ints | None = None  # [length]
    prompt_tokens: int = 0  # leading tokens that pooling leaves out
    is_cut: bool = False  # there was more of the input


@dataclass(frozen=True, slots=True)
class Entry:
    """An encoding on its way through the queue; the only thing that crosses to the device's side."""

    id: int
    kind: Kind
    input_ids: Ints  # [length]
    token_type_ids: Ints | None = None  # [length]
    prompt_tokens: int = 0
    deadline_ns: int | None = None  # CLOCK_MONOTONIC
    queued_ns: int = 0  # CLOCK_MONOTONIC

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed entries: sequences laid end to end, without padding."""

    entries: Sequence[Entry]
    input_ids: Ints  # [tokens]
    position_ids: Ints  # [tokens], restarting at 0 with each sequence
    token_type_ids: Ints  # [tokens]
    cu_seqlens: Ints  # [entries + 1], starts with 0
    max_seqlen: int


class Output(NamedTuple):
    """What the device returns for one entry.

    arrays: EMBED ([dim],); EMBED_ALL ([tokens, hidden],); PREDICT ([labels],) logits;
    EMBED_SPARSE (indices [n] uint32 ascending, values [n]). Floats are float32.
    """

    id: int
    arrays: Arrays
    queue_ns: int
    inference_ns: int
    batch_size: int = 1  # entries that ran together


class Failure(NamedTuple):
    """The device could not answer one entry; `error` is a TeiError whose text is fit for the caller."""

    id: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Metadata:
    """What one answer cost; times in nanoseconds."""

    compute_chars: int
    compute_tokens: int
    total_time_ns: int
    tokenization_time_ns: int
    queue_time_ns: int
    inference_time_ns: int
    batch_size: int = 1  # inputs that ran together; not part of the contract


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """One vector."""

    embeddings: Floats  # [dim]
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class EmbedManyResult:
    """One vector per input."""

    embeddings: Floats  # [inputs, dim]
    metadata: Metadata  # of all together; the average of their times


@dataclass(frozen=True, slots=True)
class EmbedAllResult:
    """One vector per token."""

    token_embeddings: Floats  # [tokens, hidden]
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class EmbedSparseResult:
    """The non-zero entries of a vocabulary-sized vector, ascending by index."""

    indices: NDArray[np.uint32]  # [n]
    values: Floats  # [n]
    metadata: Metadata


class Prediction(NamedTuple):
    """A label and its score."""

    score: float
    label: str


@dataclass(frozen=True, slots=True)
class PredictResult:
    """Every label, best first."""

    predictions: list[Prediction]
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Rank:
    """A text's position in the request and its score."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class RerankResult:
    """Texts by relevance, best first."""

    ranks: list[Rank]
    metadata: Metadata


class SimpleToken(NamedTuple):
    """One token; start and stop are UTF-8 byte offsets, None for tokens that the tokenizer added."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True)
class Info:
    """What is served, and within which limits."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: ModelType
    device: str  # "cpu", "cuda", "mps"
    optimized: bool  # our packed implementation, not the generic one
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    tokenization_workers: int
    embeds: bool  # answers Embed (some models only with normalize off)
    embeds_sparse: bool
    embeds_all: bool
    hidden_size: int  # values of a token vector
    kernels: str = ""  # what attention runs on
    prompts: Mapping[str, str] = field(default_factory=dict)
    pooling: Sequence[Pooling] = ()  # concatenated
    modules: Sequence[str] = ()  # after pooling


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What only the loaded model knows; the device reports it once it is ready."""

    dtype: str  # "float32", "bfloat16", ...
    device: str  # "cpu", "cuda", "mps"
    optimized: bool  # our packed implementation, not the generic one
    embedding_size: int  # values of a pooled vector, after Dense modules
    hidden_size: int  # values of a token vector
    kernels: str = ""  # what attention runs on
