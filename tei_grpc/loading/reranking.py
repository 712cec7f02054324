"""What a checkpoint says about scoring a pair with a language model: whose logits count, in which template."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.loading.chat_template import (
    QWEN3_RERANKER,
    PairTemplate,
    choose_template,
    qwen3_reranker,
    read_source,
    split,
)
from tei_grpc.loading.sentence_transformers import Description, ScoreTokens
from tei_grpc.loading.tokenizer_files import read_tokenizer

logger = logging.getLogger(__name__)

ANSWERS = ("yes", "no")  # what a language model without a LogitScore module is asked to say


def find_score_tokens(
    folder: Path, hf_config: Mapping[str, Any], described: Description, config: EngineConfig
) -> ScoreTokens | None:
    """The tokens whose logits score a pair: of the LogitScore module, else `yes` and `no` of a language model.

    A language model is taken for a reranker when it has that module, when `--chat-template` is given, or when it is
    called Qwen3-Reranker; in the latter two cases only if nothing says how to pool it. Raises StartupError for a
    vocabulary without the answers.
    """
    if described.score_tokens is not None:
        return described.score_tokens
    language_model = any(str(name).endswith("ForCausalLM") for name in hf_config.get("architectures") or ())
    if not language_model or described.pooling or config.pooling:
        return None
    return _answers(folder, hf_config) if config.chat_template or _is_qwen3_reranker(config) else None


def find_template(
    folder: Path, described: Description, config: EngineConfig, instruction: str | None
) -> PairTemplate | None:
    """The words around a query and a document; None where the two are joined as the tokenizer does it.

    That of `--chat-template`, else the checkpoint's, else Qwen3-Reranker's by its name if it is a language model.
    """
    if config.chat_template:
        logger.info("pairs are put into the chat template `%s`", config.chat_template)
        return choose_template(config.chat_template, folder, instruction, described.template_variables)
    source = read_source(folder) if described.takes_messages else None
    template = split(source, folder, instruction, described.template_variables) if source else None
    if template is not None:
        logger.info("pairs are put into the checkpoint's chat template")
    elif source:
        logger.warning("the checkpoint's chat template has no place for a query and a document, and is not used")
    return template


def require_template(template: PairTemplate | None, config: EngineConfig, instruction: str | None) -> PairTemplate:
    """What `find_template` found for a language model without a classification head, which cannot do without one."""
    if template is not None:
        return template
    if not _is_qwen3_reranker(config):
        raise StartupError("The model scores pairs by tokens, but has no template for a pair; give `--chat-template`")
    logger.info("pairs are put into the template that Qwen3-Reranker documents, because the model is called so")
    return qwen3_reranker(instruction)


def _is_qwen3_reranker(config: EngineConfig) -> bool:
    """Only the name tells: these checkpoints state neither answers nor template."""
    return QWEN3_RERANKER in Path(config.model_id).name.lower()


def _answers(folder: Path, hf_config: Mapping[str, Any]) -> ScoreTokens:
    tokenizer = read_tokenizer(folder, hf_config)
    true, false = (tokenizer.token_to_id(answer) for answer in ANSWERS)
    if true is None or false is None:
        raise StartupError("The model's vocabulary has no tokens `yes` and `no` to score a pair by")
    return ScoreTokens(true, false)
