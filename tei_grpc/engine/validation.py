"""Checks of what callers send, before any work is done. Pure functions that raise ValidationError or ModelTypeError."""

from collections.abc import Sequence

from tei_grpc.errors import ModelTypeError, ValidationError
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.types import Input, Kind, ModelType, Pooling

CHARS_PER_TOKEN = 250  # no honest text has longer tokens on average; past it a text is refused, or cut, unread


def max_chars(max_input_length: int) -> int:
    """Most characters of an input, before tokenizing."""
    return CHARS_PER_TOKEN * max_input_length


def check_input(model: ModelConfig, input: Input) -> None:
    """Not empty, and not absurdly long unless it may be truncated."""
    if not input.text and not input.pair:
        raise ValidationError("`inputs` cannot be empty")
    if not input.truncate:
        check_chars(input.chars, model.max_input_length)
    if input.pair is None:
        resolve_prompt(model, input.prompt_name)


def check_text(model: ModelConfig, text: str) -> None:
    """An input of Tokenize, which never truncates."""
    if not text:
        raise ValidationError("`inputs` cannot be empty")
    check_chars(len(text), model.max_input_length)


def check_chars(chars: int, max_input_length: int) -> None:
    """At most `max_chars` characters."""
    limit = max_chars(max_input_length)
    if chars > limit:
        raise ValidationError(f"`inputs` must have less than {limit} characters. Given: {chars}")


def check_tokens(tokens: int, max_input_length: int) -> None:
    """At least one token, at most `max_input_length`."""
    if tokens == 0:
        raise ValidationError("`inputs` must have at least 1 token. Given: 0")
    if tokens > max_input_length:
        raise ValidationError(f"`inputs` must have less than {max_input_length} tokens. Given: {tokens}")


def check_ids(model: ModelConfig, ids: Sequence[int]) -> None:
    """An input of Decode: some ids, no more than an input may have characters."""
    if not ids:
        raise ValidationError("`input_ids` cannot be empty")
    limit = max_chars(model.max_input_length)
    if len(ids) > limit:
        raise ValidationError(f"`input_ids` must have less than {limit} ids. Given: {len(ids)}")


def check_dimensions(dimensions: int | None, embedding_size: int) -> None:
    """1 to `embedding_size`, where given."""
    if dimensions is None:
        return
    if dimensions < 1:
        raise ValidationError("`dimensions` should be positive")
    if dimensions > embedding_size:
        raise ValidationError(
            "`dimensions` should be smaller than the maximum embedding dimension. "
            f"Given: {dimensions}, maximum: {embedding_size}"
        )


def resolve_prompt(model: ModelConfig, prompt_name: str | None) -> str:
    """The text that goes in front of an input: the named prompt, else the default one, else nothing."""
    if prompt_name is None:
        return model.default_prompt or ""
    if not model.prompts:
        raise ValidationError(
            f"`prompt_name` is set to `{prompt_name}` but no prompts were found "
            "in the Sentence Transformers configuration"
        )
    if prompt_name not in model.prompts:
        available = ", ".join(f'"{name}"' for name in sorted(model.prompts))
        raise ValidationError(
            f"`prompt_name` is set to `{prompt_name}` but it was not found in the Sentence Transformers prompts. "
            f"Available prompts: [{available}]"
        )
    return model.prompts[prompt_name]


def check_kind(model: ModelConfig, kind: Kind, *, normalize: bool = False) -> None:
    """The loaded model answers this kind of request."""
    if kind is Kind.PREDICT:
        if model.kind is ModelType.EMBEDDING:
            raise ModelTypeError("Backend error: Model is not a classifier model")
        return
    splade = Pooling.SPLADE in model.pooling
    if kind is Kind.EMBED_SPARSE:
        if not splade and model.token_heads.lexical is None:
            raise ModelTypeError("Backend error: Model is not an embedding model with SPLADE pooling")
        return
    if splade and kind is Kind.EMBED_ALL:
        raise ModelTypeError("Backend error: `embed_all` is not available for SPLADE models")
    if splade and normalize:
        raise ModelTypeError("Backend error: `normalize` is not available for SPLADE models")
    if model.kind is not ModelType.EMBEDDING:
        raise ModelTypeError("Backend error: Model is not an embedding model")


def check_reranker(model: ModelConfig) -> None:
    """The loaded model has exactly one label."""
    if model.kind is ModelType.CLASSIFIER:
        raise ModelTypeError("model is not a re-ranker model")
    if model.kind is ModelType.EMBEDDING:
        raise ModelTypeError("model is not a classifier model")


def check_arity(texts: Sequence[str]) -> None:
    """An input of PredictPair: a text or a pair."""
    if len(texts) not in (1, 2):
        raise ValidationError(f"`inputs` must have a single or two elements. Given: {len(texts)}", prefixed=False)


def check_some(texts: Sequence[object]) -> None:
    """A Rerank call has texts."""
    if not texts:
        raise ValidationError("`texts` cannot be empty", prefixed=False)


def check_list(inputs: Sequence[object]) -> None:
    """A call for many inputs has some, and is none itself."""
    if isinstance(inputs, str):
        raise ValidationError("`inputs` must be a list of inputs. Given: one text", prefixed=False)
    if len(inputs) == 0:
        raise ValidationError("`inputs` cannot be empty", prefixed=False)


def check_texts(texts: Sequence[str], max_client_batch_size: int) -> None:
    """The texts of one unary Rerank call."""
    check_some(texts)
    if len(texts) > max_client_batch_size:
        raise ValidationError(
            f"batch size {len(texts)} > maximum allowed batch size {max_client_batch_size}", prefixed=False
        )
