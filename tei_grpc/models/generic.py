"""Owns the generic path: an architecture without a family of ours, run by transformers' own classes.

Slower than a family, because texts are padded, but with the same promises: a checkpoint's tensors all fit or the
server does not start, code that comes with a checkpoint is never run, and batch mates never change a result.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tei_grpc.errors import StartupError
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.precision import Float32
from tei_grpc.loading import pretrained
from tei_grpc.loading.files import read_value
from tei_grpc.loading.model_config import CONFIG
from tei_grpc.models import Blueprint, Head, Model, model_types

T = TypeVar("T")

ATTENTION_SWITCH = "set_attention_type"  # BigBird's switch
SEGMENTS_WITHOUT_SIZE = ("xlnet",)  # takes token types, though its config does not count them
PROBE_TOKENS, PROBE_PADDED = 11, 16
TOLERANCE = 1e-4  # of a vector's length: rounding stays below it, mixing with padding does not


class Slab(NamedTuple):
    """Texts that go through the model in one call."""

    rows: Tensor  # [texts, length] packed row of each position; padding repeats a row of the same text
    real: Tensor  # [texts, length] bool, False for padding


class Generic(Model):
    """A model of transformers behind our interface. Built by `load_generic`."""

    heads = frozenset(Head)
    optimized = False

    def __init__(self, blueprint: Blueprint, model: Any) -> None:
        """Run a short text to learn how the model takes it. Raises StartupError when it cannot be served."""
        super().__init__(blueprint)
        self.model = model
        self.name = f"{type(model).__name__} of transformers"
        self.head = blueprint.head
        self.encoder = model.base_model if blueprint.head is Head.MASKED_LM else model
        self.takes = frozenset(inspect.signature(self.encoder.forward).parameters)
        pad_token_id = _value(model.config, "pad_token_id", int)
        self.pad_token_id = pad_token_id or 0
        self.one_by_one = self.head is Head.CLASSIFICATION and pad_token_id is None
        self.padded_length = partial(padded_length, positions=_positions(model.config))
        self.counts_types = _counts_types(model.config, self.takes)
        self.hidden_size, self.pads = self._probe()

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`. Empty for a classifier: transformers runs its encoder and its head in one."""
        if self.head is Head.CLASSIFICATION:
            return torch.empty(len(inputs.input_ids), 0, device=inputs.input_ids.device)
        slabs = list(self._slabs(inputs))
        states = torch.cat([self._run(self._arguments(inputs, slab))[slab.real] for slab in slabs])
        rows = torch.cat([slab.rows[slab.real] for slab in slabs])
        return states[rows.argsort()]

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        slabs = list(self._slabs(inputs))
        logits = torch.cat([self._run(self._arguments(inputs, slab)) for slab in slabs])
        order = torch.cat([inputs.text_ids[slab.rows[:, 0]] for slab in slabs])
        return logits[order.argsort()]

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        stand_in, head = copy.copy(self.encoder), copy.copy(self.model)
        stand_in.forward = lambda *args, **kwargs: self._output_class(last_hidden_state=hidden[None])
        head._modules = {**self.model._modules, self.model.base_model_prefix: stand_in}
        logits: Tensor = head(input_ids=torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device))[0]
        return logits[0]

    def _slabs(self, inputs: PackedInputs) -> Iterator[Slab]:
        for slab in _slabs(inputs, self.padded_length if self.pads else None):
            yield from _one_each(slab) if self.one_by_one else (slab,)

    def _arguments(self, inputs: PackedInputs, slab: Slab) -> dict[str, Tensor]:
        """By name, only what the model takes. Positions are left to it: padding is on the right, so they count up."""
        ids = inputs.input_ids[slab.rows].masked_fill(~slab.real, self.pad_token_id)
        arguments = {"input_ids": ids, "attention_mask": slab.real.long()}
        if self.counts_types:
            arguments["token_type_ids"] = inputs.token_type_ids[slab.rows]
        return {name: tensor for name, tensor in arguments.items() if name in self.takes}

    def _run(self, arguments: Mapping[str, Tensor]) -> Tensor:
        """First output of the model: [texts, length, hidden], or [texts, labels]."""
        if hasattr(self.model.base_model, ATTENTION_SWITCH):
            # a short text would otherwise leave all later ones with full attention
            self.model.base_model.set_attention_type(self.model.config.attention_type)
        output = self.encoder(**arguments)
        self._output_class = type(output)
        first: Tensor = output[0]
        return first

    def _probe(self) -> tuple[int, bool]:
        """Values of a token vector, and whether padding leaves a text's own output alone."""
        try:
            with torch.inference_mode():
                self._run(self._plain(_texts(self.model.config)[:1]))  # some operations do not exist in 16 bits
                with Float32():  # in 16 bits, rounding or an overflow would hide the difference
                    return self._compare_runs(_texts(self.model.config))
        except StartupError:
            raise
        except Exception as error:  # whatever an architecture raises that wants more than a text
            dtype = str(self.model.config.dtype).removeprefix("torch.")
            raise StartupError(f"{self.name} cannot run a plain text in {dtype}: {error}") from error

    def _compare_runs(self, texts: Tensor) -> tuple[int, bool]:
        alone = self._run(self._plain(texts[:1]))
        self._check_outputs(texts[:1], alone)
        if not self.one_by_one and not self._is_close(self._run(self._plain(texts))[:1], alone):
            raise StartupError(f"{self.name} gives a text another output with other texts beside it")
        size = alone.shape[-1] if self.head is not Head.CLASSIFICATION else self.model.config.hidden_size
        return size, self._is_harmless_to_pad(texts[:1], alone)

    def _check_outputs(self, text: Tensor, alone: Tensor) -> None:
        if self.head is Head.CLASSIFICATION:
            return
        if alone.dim() != 3 or alone.shape[1] != PROBE_TOKENS:
            raise StartupError(f"{self.name} does not return one vector per token")
        if self.head is Head.MASKED_LM:
            self._check_head(text, alone)

    def _check_head(self, text: Tensor, hidden: Tensor) -> None:
        """The head alone must give what the whole model gives."""
        whole = self.model(input_ids=text)[0]
        if not self._is_close(self.vocabulary_logits(hidden[0])[None], whole):
            raise StartupError(f"{self.name} has a head that cannot run on its own")

    def _is_harmless_to_pad(self, text: Tensor, alone: Tensor) -> bool:
        by_length = hasattr(self.model.base_model, ATTENTION_SWITCH) or "longrope" in _rope_types(self.model.config)
        if by_length or "attention_mask" not in self.takes:
            return False
        arguments = self._plain(nn.functional.pad(text, (0, PROBE_PADDED - PROBE_TOKENS), value=self.pad_token_id))
        arguments["attention_mask"][:, PROBE_TOKENS:] = 0
        padded = self._run(arguments)
        return self._is_close(padded if self.head is Head.CLASSIFICATION else padded[:, :PROBE_TOKENS], alone)

    def _plain(self, ids: Tensor) -> dict[str, Tensor]:
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.counts_types:
            arguments["token_type_ids"] = torch.zeros_like(ids)
        return {name: tensor for name, tensor in arguments.items() if name in self.takes}

    def _is_close(self, a: Tensor, b: Tensor) -> bool:
        distance = (a.float() - b.float()).norm(dim=-1)
        return bool((distance <= TOLERANCE * b.float().norm(dim=-1)).all())


def _value(config: Any, name: str, kind: type[T]) -> T | None:
    """Of a key that transformers may not have looked at, or have another name for. Raises StartupError."""
    return read_value({name: getattr(config, name, None)}, name, kind, CONFIG)


def _texts(config: Any) -> Tensor:
    """Two texts of made-up tokens, [2, tokens]."""
    ids: Tensor = (torch.arange(2 * PROBE_TOKENS) * 7 + 5) % config.vocab_size
    return ids.view(2, PROBE_TOKENS)


def _slabs(inputs: PackedInputs, padded: Callable[[int], int] | None) -> Iterator[Slab]:
    """Texts of one length at a time, or of one padded length."""
    firsts, lengths = np.array(inputs.offsets[:-1]), np.diff(inputs.offsets)
    sizes = np.array([padded(length) if padded else length for length in lengths.tolist()])
    for size in np.unique(sizes).tolist():
        first, length = firsts[sizes == size, None], lengths[sizes == size, None]
        positions = np.arange(size)
        rows, real = first + np.minimum(positions, length - 1), positions < length
        yield Slab(*(torch.from_numpy(array).to(inputs.input_ids.device) for array in (rows, real)))


def padded_length(length: int, positions: int) -> int:
    """The length to which a text is padded. It depends on the model and on nothing but the text's own length.

    The next multiple of 8, or, for long texts, of a sixteenth of the next power of two, which bounds both the waste
    and the number of calls; but no more than the model has positions.
    """
    step = max(8, 1 << max(0, (length - 1).bit_length() - 4))
    return max(length, min(-(-length // step) * step, positions))


def _positions(config: Any) -> int:
    """Rows of the position table; some models have none, and say -1."""
    found = (_value(config, name, int) for name in ("max_position_embeddings", "n_positions"))
    return next((rows for rows in found if rows and rows > 0), sys.maxsize)


def _one_each(slab: Slab) -> Iterator[Slab]:
    return (Slab(slab.rows[i : i + 1], slab.real[i : i + 1]) for i in range(len(slab.rows)))


def _rope_types(config: Any) -> set[str]:
    """Names of the kinds of rotary embeddings, of which some models have one for each kind of layer."""
    parameters = _value(config, "rope_parameters", dict) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(one.get("rope_type")) for one in each}


def _counts_types(config: Any, takes: frozenset[str]) -> bool:
    """Some models read token types as words where their config does not count types: those get none."""
    counted = (_value(config, "type_vocab_size", int) or 0) > 1 or config.model_type in SEGMENTS_WITHOUT_SIZE
    return counted and "token_type_ids" in takes


_AUTO_CLASSES = {
    Head.NONE: ("AutoModel", "MODEL_MAPPING"),
    Head.CLASSIFICATION: ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    Head.MASKED_LM: ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
}


def load_generic(folder: Path, blueprint: Blueprint, dtype: torch.dtype) -> Generic:
    """The checkpoint in `folder`, from local files only, on the CPU.

    Raises StartupError: without the extra `generic`, for an architecture that transformers lacks, for one that cannot
    be served, and naming the tensors that are missing, unexpected or of another shape.
    """
    transformers = pretrained.import_transformers(blueprint.config)
    pretrained.check_native(transformers, blueprint.config, supported=model_types())
    config = pretrained.read_config(transformers, folder)
    if "dynamic" in _rope_types(config):
        raise StartupError("`rope_type` dynamic is not supported: in transformers, long texts change what follows them")
    auto = _auto_class(transformers, config, blueprint.head)
    unused = () if blueprint.head is Head.CLASSIFICATION else ("pooler",)
    return Generic(blueprint, pretrained.load(auto, folder, config, dtype=dtype, unused=unused))


def _auto_class(transformers: Any, config: Any, head: Head) -> Any:
    """The class of transformers that reads off the config which model to build."""
    if head is Head.NONE and type(config) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
        return transformers.AutoModelForTextEncoding  # without the decoder, where the architecture has one
    if getattr(config, "is_encoder_decoder", False):
        what = "its encoder alone" if head is Head.NONE else head
        raise StartupError(f"`model_type` {config.model_type} is an encoder-decoder: {what} is not supported")
    name, mapping = _AUTO_CLASSES[head]
    if type(config) not in getattr(transformers, mapping):
        raise StartupError(f"transformers has no {head} for `model_type` {config.model_type}")
    return getattr(transformers, name)
