"""Owns how hidden states become the answers of each kind: computed on the device, read on the host."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tei_grpc.engine.pooling import Span, pool, splade
from tei_grpc.engine.token_heads import ColbertHead, LexicalHead, strongest
from tei_grpc.errors import InferenceError, TeiError
from tei_grpc.layers.packed import PackedInputs, upload
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.models import Model
from tei_grpc.types import Arrays, Entry, Kind, ModelType, Pooling

Answer = Arrays | TeiError

LOGITS_BYTES = 32 << 20  # vocabulary logits that exist at a time; two shards of a batch may have as many each


class NotFiniteError(InferenceError):
    """The model's output holds NaN or infinity."""

    def __init__(self) -> None:
        super().__init__("The model's output for this input is not finite")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch after the encoder."""

    hidden: Tensor  # [tokens, hidden]
    inputs: PackedInputs
    entries: Sequence[Entry]

    def spans(self, rows: Sequence[int]) -> list[Span]:
        """Where the texts `rows` of the batch lie."""
        offsets = self.inputs.offsets
        return [Span(offsets[row], offsets[row + 1], self.entries[row].prompt_tokens) for row in rows]


class Piece(NamedTuple):
    """What some texts get, one below the other."""

    values: Tensor  # [rows, ...], on the device
    counts: Sequence[int]  # rows of each text


class Answerer(NamedTuple):
    """Answers one kind: `compute` works on the device, for some texts; `read` takes what they got, on the host."""

    compute: Callable[[Encoded, Sequence[int]], Iterator[Piece]]
    read: Callable[[Sequence[Entry], Piece], list[Answer]]


def answerers(
    config: ModelConfig, model: Model, modules: Callable[[Tensor], Tensor], device: torch.device
) -> Mapping[Kind, Answerer]:
    """Of every kind that the model answers; `modules` run on pooled vectors. Raises StartupError."""
    pooling, heads = config.pooling, config.token_heads
    if not pooling:
        return {Kind.PREDICT: Answerer(partial(_logits, model), _read_rows)}
    if Pooling.SPLADE in pooling:
        compute = partial(_splade, model, max(1, LOGITS_BYTES // (4 * config.vocabulary)))
        return {Kind.EMBED_SPARSE: Answerer(compute, _each(_read_sparse)), Kind.EMBED: Answerer(compute, _read_rows)}
    pooled = Answerer(partial(_pooled, model, modules, pooling), _read_rows)
    if config.kind is not ModelType.EMBEDDING:
        return {Kind.PREDICT: pooled}
    found = {Kind.EMBED: pooled, Kind.EMBED_ALL: Answerer(partial(_tokens, lambda hidden: hidden), _each(_read_tokens))}
    if heads.lexical:
        lexical = LexicalHead(heads.lexical, model.hidden_size).to(device)
        found[Kind.EMBED_SPARSE] = Answerer(partial(_tokens, lexical), _each(partial(_read_lexical, heads.dropped_ids)))
    if heads.colbert:
        colbert = ColbertHead(heads.colbert, model.hidden_size).to(device)
        found[Kind.EMBED_ALL] = Answerer(partial(_tokens, colbert), _each(_read_colbert))
    return found


def _pooled(
    model: Model,
    modules: Callable[[Tensor], Tensor],
    pooling: Sequence[Pooling],
    encoded: Encoded,
    rows: Sequence[int],
) -> Iterator[Piece]:
    vectors = pool(encoded.hidden, encoded.spans(rows), pooling)
    yield Piece(modules(model.after_pooling(vectors)), [1] * len(rows))


def _logits(model: Model, encoded: Encoded, rows: Sequence[int]) -> Iterator[Piece]:
    logits = model.classify(encoded.hidden, encoded.inputs)
    yield Piece(logits[upload(rows, logits.device)], [1] * len(rows))


def _splade(model: Model, logits_rows: int, encoded: Encoded, rows: Sequence[int]) -> Iterator[Piece]:
    for weights in splade(encoded.hidden, encoded.spans(rows), model.vocabulary_logits, logits_rows):
        yield Piece(weights[None], [1])


def _tokens(head: Callable[[Tensor], Tensor], encoded: Encoded, rows: Sequence[int]) -> Iterator[Piece]:
    """Token by token; texts side by side go through the head together."""
    spans = encoded.spans(rows)
    start, stop = spans[0].start, spans[-1].stop
    counts = [span.stop - span.start for span in spans]
    if stop - start == sum(counts):
        yield Piece(head(encoded.hidden[start:stop]), counts)
    else:
        yield Piece(head(torch.cat([encoded.hidden[span.start : span.stop] for span in spans])), counts)


def _each(read: Callable[[Entry, Tensor], Answer]) -> Callable[[Sequence[Entry], Piece], list[Answer]]:
    """Text by text."""

    def read_all(entries: Sequence[Entry], piece: Piece) -> list[Answer]:
        parts = torch.split(piece.values, list(piece.counts))
        return [read(entry, rows) for entry, rows in zip(entries, parts, strict=True)]

    return read_all


def _read_rows(_: Sequence[Entry], piece: Piece) -> list[Answer]:
    """A row for each text."""
    array = piece.values.float().numpy()
    are_finite = np.isfinite(array).all(axis=1).tolist()
    return [(row.copy(),) if is_finite else NotFiniteError() for row, is_finite in zip(array, are_finite, strict=True)]


def _read_tokens(_: Entry, rows: Tensor) -> Answer:
    """As an array of its own, or the entry's error: one that holds NaN or infinity is no answer."""
    array = np.array(rows.float().numpy())
    return (array,) if np.isfinite(array).all() else NotFiniteError()


def _read_sparse(entry: Entry, rows: Tensor) -> Answer:
    answer = _read_tokens(entry, rows[0])
    if isinstance(answer, TeiError):
        return answer
    values = answer[0]
    indices = np.flatnonzero(values)  # no weight is negative
    return indices.astype(np.uint32), values[indices]


def _read_lexical(dropped: frozenset[int], entry: Entry, rows: Tensor) -> Answer:
    answer = _read_tokens(entry, rows)
    if isinstance(answer, TeiError):
        return answer
    return strongest(entry.input_ids, answer[0].astype(np.float32), dropped)


def _read_colbert(entry: Entry, rows: Tensor) -> Answer:
    """The first token has no vector."""
    return _read_tokens(entry, rows[1:])
