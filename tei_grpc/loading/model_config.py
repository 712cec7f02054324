"""Reads what a checkpoint says about itself (config.json and the sentence-transformers files) into one ModelConfig."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.loading import reranking, sentence_transformers
from tei_grpc.loading.architecture import infer_architectures
from tei_grpc.loading.chat_template import PairTemplate
from tei_grpc.loading.files import read_object, read_strings, read_value
from tei_grpc.loading.sentence_transformers import Module, ScoreTokens
from tei_grpc.loading.sizes import check_sizes
from tei_grpc.loading.token_heads import TokenHeads, read_token_heads
from tei_grpc.types import ModelType, Pooling

logger = logging.getLogger(__name__)

CONFIG = "config.json"
UNLIMITED = 10**9  # tokenizers without a limit say 1e30
AFTER_PADDING = (  # model types that count positions as RoBERTa does
    *("roberta", "xlm-roberta", "camembert", "longformer", "data2vec-text"),
    *("ibert", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"),
)
LLAMA_BIDIREC_POOLING = {"avg": Pooling.MEAN, "cls": Pooling.CLS, "last": Pooling.LAST_TOKEN}
MAX_LABELS = 10**6  # a typing error in an index must not fill the memory


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint's own description of itself, after command-line overrides. Holds no weights and needs no torch."""

    folder: Path
    model_type: str  # config.json `model_type`, "bert"
    architectures: tuple[str, ...]
    hf_config: Mapping[str, Any]  # config.json as it stands
    kind: ModelType
    pooling: tuple[Pooling, ...]  # concatenated; empty where a head of the model itself classifies
    max_input_length: int  # tokens, special tokens included
    labels: tuple[str, ...] = ()  # by index; empty for embedding models
    multi_label: bool = False  # problem_type: a sigmoid per label
    modules: tuple[Module, ...] = ()  # after pooling, in order
    include_prompt: bool = True  # prompt tokens take part in pooling
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False  # lower-case every text before tokenizing
    template: PairTemplate | None = None  # around a query and a document
    score_tokens: ScoreTokens | None = None  # of a language model that scores pairs by its vocabulary's logits
    token_heads: TokenHeads = field(default_factory=TokenHeads)
    vocabulary: int = 1  # config.json `vocab_size`; some of transformers' models have it elsewhere


def read_model_config(folder: Path, config: EngineConfig) -> ModelConfig:
    """Everything `folder` says about its model, with the options of `config` applied. Raises StartupError."""
    hf_config = _with_model_type(read_object(folder / CONFIG))
    check_sizes(hf_config)
    model_type = read_value(hf_config, "model_type", str, CONFIG) or ""
    described = sentence_transformers.read(folder)
    architectures = read_architectures(hf_config) or infer_architectures(
        folder, pooled=bool(described.pooling or config.pooling)
    )
    score_tokens = reranking.find_score_tokens(folder, hf_config, described, config)
    own_head = is_classifier(architectures, config.pooling) or score_tokens is not None
    labels = _labels(hf_config, described, score_tokens) if own_head or described.scores is not None else ()
    kind = _kind(bool(labels), labels)
    pooling = () if own_head else _pooling(hf_config, architectures, described, config)
    prompt = _default_prompt(kind, described, config)
    template = _template(folder, kind, described, config, prompt)
    if score_tokens is not None:
        template = reranking.require_template(template, config, prompt)
        logger.info("pairs are scored by the logits of token %d (yes) and %s (no)", *score_tokens)
    return ModelConfig(
        folder=folder,
        model_type=model_type,
        architectures=architectures,
        hf_config=hf_config,
        kind=kind,
        pooling=pooling,
        max_input_length=_max_input_length(hf_config, described, config),
        labels=labels,
        multi_label=hf_config.get("problem_type") == "multi_label_classification",
        modules=_modules(folder, pooling, described, config),
        include_prompt=described.include_prompt,
        prompts=described.prompts,
        default_prompt=prompt if kind is ModelType.EMBEDDING else None,
        lower_case=described.lower_case,
        template=template,
        score_tokens=score_tokens,
        token_heads=_token_heads(folder, hf_config, kind, pooling, config),
        vocabulary=read_value(hf_config, "vocab_size", int, CONFIG) or 1,
    )


def _with_model_type(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Jina's reranker v2 leaves its `model_type` to its remote code."""
    remote = str((read_value(hf_config, "auto_map", dict, CONFIG) or {}).get("AutoConfig"))
    if "model_type" not in hf_config and remote.endswith("XLMRobertaFlashConfig"):
        return {**hf_config, "model_type": "xlm-roberta"}
    return hf_config


def _labels(
    hf_config: Mapping[str, Any], described: sentence_transformers.Description, score_tokens: ScoreTokens | None
) -> tuple[str, ...]:
    if score_tokens is not None:
        return ("LABEL_0",)
    labels = read_labels(hf_config)
    if described.scores is None or len(labels) == described.scores:
        return labels
    _check_count(described.scores)
    return tuple(f"LABEL_{index}" for index in range(described.scores))


def _template(
    folder: Path,
    kind: ModelType,
    described: sentence_transformers.Description,
    config: EngineConfig,
    instruction: str | None,
) -> PairTemplate | None:
    if kind is not ModelType.RERANKER:
        if config.chat_template:
            raise StartupError(f"`--chat-template` is for rerankers, this is a model of kind {kind.value}")
        return None
    template = reranking.find_template(folder, described, config, instruction)
    if template is None and (config.default_prompt or config.default_prompt_name):
        logger.warning("a default prompt has no effect on a reranker without a chat template")
    if template is not None and config.split_special_tokens:
        raise StartupError("`--split-special-tokens` does not go with a chat template, which has special tokens itself")
    return template


def _token_heads(
    folder: Path, hf_config: Mapping[str, Any], kind: ModelType, pooling: tuple[Pooling, ...], config: EngineConfig
) -> TokenHeads:
    if kind is ModelType.EMBEDDING and Pooling.SPLADE not in pooling:
        return read_token_heads(folder, hf_config, colbert=config.colbert)
    if config.colbert:
        raise StartupError("`--colbert` is for embedding models with a ColBERT head; this model has none")
    return TokenHeads()


def read_architectures(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the transformers classes that the checkpoint was saved from; often just one, sometimes none."""
    return tuple(read_strings(hf_config, "architectures", CONFIG))


def is_classifier(architectures: tuple[str, ...], pooling: str | None) -> bool:
    """A sequence-classification head is what the checkpoint is for.

    Token classifiers and question answerers are none: they serve as encoders.
    """
    found = any(name.endswith("ForSequenceClassification") for name in architectures)
    if found and pooling is not None:
        logger.warning("`--pooling` has no effect on a sequence-classification model")
    return found


def read_labels(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Labels by numeric index, `LABEL_i` where `id2label` has none; without it, `num_labels` of them (2 by default)."""
    names = {
        _label_index(key): str(name) for key, name in (read_value(hf_config, "id2label", dict, CONFIG) or {}).items()
    }
    size = max(names) + 1 if names else read_value(hf_config, "num_labels", int, CONFIG) or 2
    _check_count(size)
    return tuple(names.get(index, f"LABEL_{index}") for index in range(size))


def _check_count(labels: int) -> None:
    if not 0 < labels <= MAX_LABELS:
        raise StartupError(f"`{CONFIG}`: {labels} labels; there may be 1 to {MAX_LABELS}")


def _label_index(key: str) -> int:
    if not key.isdecimal() or len(key) > len(str(MAX_LABELS)):
        raise StartupError(f"`{CONFIG}`: `id2label` must have the labels' numbers as keys, not {key!r:.100}")
    return int(key)


def position_offset(hf_config: Mapping[str, Any]) -> int:
    """First row of the position table that a token uses: RoBERTa and its kin start after the padding row."""
    match hf_config.get("model_type"):
        case name if name in AFTER_PADDING:
            return (read_value(hf_config, "pad_token_id", int, CONFIG) or 0) + 1
        case "mpnet":
            return 2
    return 0


def _kind(classifier: bool, labels: tuple[str, ...]) -> ModelType:
    if not classifier:
        return ModelType.EMBEDDING
    return ModelType.RERANKER if len(labels) == 1 else ModelType.CLASSIFIER


def _pooling(
    hf_config: Mapping[str, Any],
    architectures: tuple[str, ...],
    described: sentence_transformers.Description,
    config: EngineConfig,
) -> tuple[Pooling, ...]:
    model_type = str(hf_config.get("model_type"))
    pooling = (Pooling(config.pooling),) if config.pooling else described.pooling
    if Pooling.SPLADE in pooling and not any(name.endswith("ForMaskedLM") for name in architectures):
        raise StartupError(
            f"`splade` pooling needs a masked-language-model head, but `architectures` is {list(architectures)}"
        )
    if Pooling.SPLADE in pooling and not read_value(hf_config, "vocab_size", int, CONFIG):
        raise StartupError(f"`splade` pooling needs `vocab_size` in `{CONFIG}`")
    if pooling:
        return pooling
    if model_type == "llama_bidirec":
        return (_llama_bidirec_pooling(hf_config),)
    if "bert" not in model_type.lower():
        raise StartupError("The model has no pooling configuration; choose one with `--pooling`")
    logger.warning(
        "the model has no pooling configuration: `cls` is used; sentence-transformers would use `mean`; "
        "`--pooling` decides"
    )
    return (Pooling.CLS,)


def _llama_bidirec_pooling(hf_config: Mapping[str, Any]) -> Pooling:
    """NVIDIA's models name it in config.json."""
    name = read_value(hf_config, "pooling", str, CONFIG) or "avg"
    if name not in LLAMA_BIDIREC_POOLING:
        raise StartupError(
            f"`{CONFIG}`: `pooling` {name!r} is not supported; supported are: {', '.join(LLAMA_BIDIREC_POOLING)}"
        )
    return LLAMA_BIDIREC_POOLING[name]


def _modules(
    folder: Path, pooling: tuple[Pooling, ...], described: sentence_transformers.Description, config: EngineConfig
) -> tuple[Module, ...]:
    if not pooling or Pooling.SPLADE in pooling:
        if config.dense_path:
            logger.warning("`--dense-path` has no effect on a model without pooled vectors")
        return ()
    if not config.dense_path:
        return described.modules
    return sentence_transformers.replace_dense(described.modules, folder / config.dense_path)


def _max_input_length(
    hf_config: Mapping[str, Any], described: sentence_transformers.Description, config: EngineConfig
) -> int:
    """The sentence-transformers limit, else the tokenizer's; never more than there are positions, nor than a batch."""
    limits = [described.max_seq_length or described.model_max_length or UNLIMITED]
    for key in ("max_position_embeddings", "n_positions", "max_trained_positions"):
        if positions := read_value(hf_config, key, int, CONFIG):
            limits.append(positions - position_offset(hf_config))
            break
    length = min(limits)
    if length < 1:
        raise StartupError(f"`{CONFIG}` leaves no position for a token")
    if length >= UNLIMITED:
        raise StartupError("Neither `config.json` nor the tokenizer says how long an input may be")
    if length > config.max_batch_tokens:
        if not config.auto_truncate:
            raise StartupError(
                f"`--max-batch-tokens` ({config.max_batch_tokens}) must not be less than the model's longest input "
                f"({length}); raise it, or let `--auto-truncate` lower the longest input"
            )
        logger.warning(
            "the longest input is lowered from %d to `--max-batch-tokens` %d", length, config.max_batch_tokens
        )
    return min(length, config.max_batch_tokens)


def _default_prompt(kind: ModelType, described: sentence_transformers.Description, config: EngineConfig) -> str | None:
    """The text put before every input to embed; for a reranker with a chat template, the instruction in it."""
    if kind is ModelType.CLASSIFIER:
        if config.default_prompt or config.default_prompt_name:
            logger.warning("a default prompt has no effect on a %s", kind.value)
        return None
    if config.default_prompt is not None:
        return config.default_prompt
    name = config.default_prompt_name or described.default_prompt_name
    if name is None:
        return None
    if name not in described.prompts and kind is ModelType.RERANKER:
        logger.warning("default prompt name `%s` is not among the model's prompts, and has no effect", name)
        return None
    if name not in described.prompts:
        raise StartupError(
            f"default prompt name `{name}` is not among the model's prompts: {sorted(described.prompts)}"
        )
    logger.info("default prompt: `%s`", name)
    return described.prompts[name]
