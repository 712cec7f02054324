"""Owns building the model of a checkpoint: by a family of ours, or through transformers."""

import logging

import torch

from tei_grpc.config import EngineConfig
from tei_grpc.engine.placement import Placement, activations
from tei_grpc.engine.quantization import prepare, quantize
from tei_grpc.errors import StartupError, reason_of
from tei_grpc.loading.config_keys import check_keys
from tei_grpc.loading.lora import open_checkpoint
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.loading.score_head import ScoredCheckpoint
from tei_grpc.loading.weights import load_weights
from tei_grpc.models import Blueprint, Head, Model, find_family
from tei_grpc.models.generic import Generic, load_generic
from tei_grpc.types import Pooling

logger = logging.getLogger(__name__)


def load_model(model: ModelConfig, config: EngineConfig, placement: Placement) -> Model:
    """The checkpoint's model on its device, laid out for it. Raises StartupError, whose text says what to change."""
    dtype = activations(placement.dtype)
    family = None if config.force_generic else find_family({**model.hf_config, "model_type": model.model_type})
    if family is None:
        return _load_generic(model, config, dtype).to(placement.device)
    logger.info("`model_type` %s runs on the packed path, as %s", model.model_type, family.__name__)
    built = _load_family(family, model, config.lora_task, dtype).to(placement.device)
    if placement.dtype == "int8":
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
    check_keys(model.hf_config)
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
