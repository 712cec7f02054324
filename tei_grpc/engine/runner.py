"""Owns the model: loads it, and turns a batch into one answer per entry."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tei_grpc import cpus
from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import pack
from tei_grpc.engine.budget import choose_budget
from tei_grpc.engine.dense import load_modules
from tei_grpc.engine.pooling import Span, pool, splade
from tei_grpc.engine.quantization import prepare, quantize
from tei_grpc.engine.token_heads import ColbertHead, LexicalHead, strongest
from tei_grpc.errors import InferenceError, ModelTypeError, StartupError, TeiError, reason_of
from tei_grpc.layers import int8
from tei_grpc.layers.packed import PackedInputs, place
from tei_grpc.layers.precision import Float32
from tei_grpc.loading.lora import open_checkpoint
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.loading.score_head import ScoredCheckpoint
from tei_grpc.loading.weights import load_weights
from tei_grpc.models import Blueprint, Head, Model, find_family
from tei_grpc.models.generic import Generic, load_generic
from tei_grpc.types import Batch, Entry, Kind, ModelFacts, ModelType, Pooling

Arrays = tuple[NDArray[np.generic], ...]
Answer = Arrays | TeiError

logger = logging.getLogger(__name__)

LOGITS_BYTES = 64 << 20  # vocabulary logits that exist at a time
WARM_UP_LENGTHS = (8, 32, 128)  # tokens
BUDGET_LENGTH = 64  # tokens of the texts that batches are measured with


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


Answerer = Callable[[Encoded, Sequence[int]], Iterator[Answer]]


class Runner:
    """One model on one device. Not thread-safe: one thread calls it."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        """Load the model. Raises StartupError, whose text says what to change."""
        self._device = torch.device("cpu")  # the only one that `--device` accepts in this version
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(cpus.available())
        dtype = config.dtype or "float32"
        self._model = _load_model(model, config, _float(dtype))
        self._modules = load_modules(model.modules)
        self._logits_rows = max(1, LOGITS_BYTES // (4 * model.hf_config["vocab_size"]))
        self._answerers = self._answerers_by_kind(model)
        self._max_input_length = model.max_input_length
        self._is_narrow = dtype != "float32"
        self.seconds_per_token = 0.0  # of the largest batch that was measured at start; 0 where none was
        self.recoveries = 0  # inputs that 16-bit numbers were too small for, answered in float32
        self.facts = ModelFacts(
            dtype=dtype,
            device=self._device.type,
            optimized=self._model.optimized,
            embedding_size=self._embedding_size(model),
            hidden_size=self._model.hidden_size,
        )

    def warm_up(self) -> None:
        """Run one small batch, so that the first caller does not pay for what kernels set up once.

        Raises StartupError when the model does not run.
        """
        try:
            self._run_blank(WARM_UP_LENGTHS)
        except Exception as error:  # numbers that fit each other on paper
            raise StartupError(f"the model that `config.json` describes does not run: {reason_of(error)}") from error

    def check(self) -> None:
        """Raise what the device raises when it can no longer run."""
        self._run_blank(WARM_UP_LENGTHS[:1])

    def _run_blank(self, lengths: Sequence[int]) -> None:
        kind = next(iter(self._answerers))
        ids = [np.zeros(min(length, self._max_input_length), np.int32) for length in lengths]
        self.run(pack([Entry(row, kind, text) for row, text in enumerate(ids)]))

    def choose_budget(self, max_tokens: int) -> int:
        """How many tokens a batch should have, found by measuring on a CPU; `max_tokens` at the most."""
        return choose_budget(self._seconds, max_tokens) if self._device.type == "cpu" else max_tokens

    def _seconds(self, tokens: int) -> float:
        length = min(BUDGET_LENGTH, self._max_input_length, tokens)
        started = time.perf_counter()
        self._run_blank([length] * max(1, tokens // length))
        seconds = time.perf_counter() - started
        self.seconds_per_token = seconds / tokens
        return seconds

    def run(self, batch: Batch) -> list[Answer]:
        """Answer every entry, in order, with what `types.Output.arrays` says for its kind, or with its own error.

        Raises whatever the device raises when the batch as a whole cannot be run.
        """
        with torch.inference_mode():
            answers = self._run(batch)
            if self._is_narrow:
                for row, answer in enumerate(answers):
                    if isinstance(answer, NotFiniteError):
                        answers[row] = self._run_again(batch.entries[row])
        return answers

    def _run(self, batch: Batch) -> list[Answer]:
        inputs = place(batch, self._device, rounded=self._device.type == "cpu" and self._model.optimized)
        encoded = Encoded(self._model.encode(inputs), inputs, batch.entries)
        answers: dict[int, Answer] = {}
        for kind, rows in _rows_by_kind(batch.entries).items():
            answerer = self._answerers.get(kind, _refuse)
            answers |= zip(rows, answerer(encoded, rows), strict=True)
        return [answers[row] for row in range(len(batch.entries))]

    def _run_again(self, entry: Entry) -> Answer:
        """An input that 16-bit numbers are too small for, alone and in float32."""
        with Float32():
            (answer,) = self._run(pack([entry]))
        if not isinstance(answer, TeiError):
            self.recoveries += 1
        return answer

    def _embedding_size(self, model: ModelConfig) -> int:
        if Pooling.SPLADE in model.pooling:
            return int(model.hf_config["vocab_size"])
        try:
            pooled = torch.zeros(1, self._model.hidden_size * max(1, len(model.pooling)))
            return int(self._modules(pooled).shape[1])
        except RuntimeError as error:
            raise StartupError(f"the modules after pooling do not fit together: {reason_of(error)}") from error

    def _answerers_by_kind(self, model: ModelConfig) -> Mapping[Kind, Answerer]:
        pooling, heads, hidden = model.pooling, model.token_heads, self._model.hidden_size
        if not pooling:
            return {Kind.PREDICT: self._predict}
        if Pooling.SPLADE in pooling:
            return {Kind.EMBED_SPARSE: self._embed_sparse, Kind.EMBED: self._embed_vocabulary}
        pooled = partial(self._embed, pooling)
        if model.kind is not ModelType.EMBEDDING:
            return {Kind.PREDICT: pooled}
        answerers: dict[Kind, Answerer] = {Kind.EMBED: pooled, Kind.EMBED_ALL: _embed_all}
        if heads.lexical:
            answerers[Kind.EMBED_SPARSE] = partial(
                _embed_lexical, LexicalHead(heads.lexical, hidden), heads.dropped_ids
            )
        if heads.colbert:
            answerers[Kind.EMBED_ALL] = partial(_embed_all, head=ColbertHead(heads.colbert, hidden))
        return answerers

    def _embed(self, pooling: Sequence[Pooling], encoded: Encoded, rows: Sequence[int]) -> Iterator[Answer]:
        pooled = pool(encoded.hidden, encoded.spans(rows), pooling)
        vectors = self._modules(self._model.after_pooling(pooled))
        return (_finite(vector) for vector in vectors)

    def _predict(self, encoded: Encoded, rows: Sequence[int]) -> Iterator[Answer]:
        logits = self._model.classify(encoded.hidden, encoded.inputs)
        return (_finite(logits[row]) for row in rows)

    def _embed_vocabulary(self, encoded: Encoded, rows: Sequence[int]) -> Iterator[Answer]:
        return (_finite(weights) for weights in self._splade(encoded, rows))

    def _embed_sparse(self, encoded: Encoded, rows: Sequence[int]) -> Iterator[Answer]:
        return (_sparse(weights) for weights in self._splade(encoded, rows))

    def _splade(self, encoded: Encoded, rows: Sequence[int]) -> Iterator[Tensor]:
        return splade(encoded.hidden, encoded.spans(rows), self._model.vocabulary_logits, self._logits_rows)


def _embed_all(encoded: Encoded, rows: Sequence[int], head: ColbertHead | None = None) -> Iterator[Answer]:
    texts = (encoded.hidden[span.start : span.stop] for span in encoded.spans(rows))
    return (_finite(head(text) if head else text) for text in texts)


def _embed_lexical(
    head: LexicalHead, dropped: frozenset[int], encoded: Encoded, rows: Sequence[int]
) -> Iterator[Answer]:
    for row, span in zip(rows, encoded.spans(rows), strict=True):
        weights = _finite(head(encoded.hidden[span.start : span.stop]))
        ids = encoded.entries[row].input_ids
        yield weights if isinstance(weights, TeiError) else strongest(ids, weights[0].astype(np.float32), dropped)


def _refuse(encoded: Encoded, rows: Sequence[int]) -> Iterator[Answer]:
    return (ModelTypeError(f"the model cannot answer `{encoded.entries[row].kind}`") for row in rows)


def _sparse(weights: Tensor) -> Answer:
    answer = _finite(weights)
    if isinstance(answer, TeiError):
        return answer
    values = answer[0]
    indices = np.flatnonzero(values)  # no weight is negative
    return indices.astype(np.uint32), values[indices]


def _finite(tensor: Tensor) -> Answer:
    """The tensor as an array of its own, or the entry's error: one that holds NaN or infinity is no answer."""
    array = np.array(tensor.float().numpy())
    return (array,) if np.isfinite(array).all() else NotFiniteError()


def _rows_by_kind(entries: Sequence[Entry]) -> dict[Kind, list[int]]:
    rows: dict[Kind, list[int]] = {}
    for row, entry in enumerate(entries):
        rows.setdefault(entry.kind, []).append(row)
    return rows


def _float(dtype: str) -> torch.dtype:
    """Of activations, and of what is stored as it comes."""
    if dtype == "int8":
        int8.require()
        return torch.bfloat16
    found: torch.dtype = getattr(torch, dtype)
    return found


def _load_model(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> Model:
    family = None if config.force_generic else find_family({**model.hf_config, "model_type": model.model_type})
    if family is None:
        return _load_generic(model, config, dtype)
    logger.info("`model_type` %s runs on the packed path, as %s", model.model_type, family.__name__)
    built = _load_family(family, model, config.lora_task, dtype)
    if config.dtype == "int8":
        quantize(built, model.hf_config["vocab_size"], model.max_input_length)
    else:
        prepare(built)
    return built


def _load_generic(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> Model:
    if config.lora_task is not None:
        raise StartupError("`--lora-task` is not supported on the generic path")
    if config.dtype == "int8":
        raise StartupError("`dtype` int8 is not supported on the generic path; use float32 or bfloat16")
    if model.score_tokens is not None:
        raise StartupError(f"scoring pairs by tokens is not supported for `model_type` {model.model_type}")
    head = _head(model, Generic)
    generic = load_generic(model.folder, Blueprint(model.hf_config, head, len(model.labels), frozenset()), dtype)
    reason = "`--force-generic`" if config.force_generic else "no family of ours serves it"
    batches = "padded" if generic.pads else "of equal length, since padding would change them"
    logger.info("`model_type` %s runs on the generic path: %s; texts are %s", model.model_type, reason, batches)
    return generic


def _load_family(family: type[Model], model: ModelConfig, lora_task: str | None, dtype: torch.dtype) -> Model:
    config = {**model.hf_config, "model_type": model.model_type}
    checkpoint = open_checkpoint(model.folder, model.hf_config, lora_task)
    if model.score_tokens is not None:
        checkpoint = ScoredCheckpoint(checkpoint, model.score_tokens, config)
    tensors = frozenset(family.names.plain(name) for name in checkpoint.names())
    try:
        with torch.device("meta"):
            built = family(Blueprint(config, _head(model, family), len(model.labels), tensors))
    except KeyError as error:
        raise StartupError(f"config.json lacks {error}, which `model_type` {model.model_type} needs") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        text = f"config.json does not describe a model of type {model.model_type}: {reason_of(error)}"
        raise StartupError(text) from error
    load_weights(built, checkpoint, family.names, dtype=dtype)
    return built


def _head(model: ModelConfig, family: type[Model]) -> Head:
    head = Head.NONE if model.pooling else Head.CLASSIFICATION
    if Pooling.SPLADE in model.pooling:
        head = Head.MASKED_LM
    if head not in family.heads:
        raise StartupError(f"{head} is not supported for `model_type` {model.model_type}")
    return head
