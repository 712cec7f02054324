"""Checks of what callers send: every text, with its numbers."""

from dataclasses import replace
from pathlib import Path

import pytest

from tei_grpc.engine import validation
from tei_grpc.errors import ModelTypeError, TeiError, ValidationError
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.types import Input, Kind, ModelType, Pooling

EMBEDDER = ModelConfig(
    folder=Path(),
    model_type="bert",
    architectures=("BertModel",),
    hf_config={},
    kind=ModelType.EMBEDDING,
    pooling=(Pooling.MEAN,),
    max_input_length=8,
)
SPLADE = replace(EMBEDDER, pooling=(Pooling.SPLADE,))
RERANKER = replace(EMBEDDER, kind=ModelType.RERANKER, pooling=(), labels=("relevance",))
CLASSIFIER = replace(EMBEDDER, kind=ModelType.CLASSIFIER, pooling=(), labels=("a", "b", "c"))
PROMPTED = replace(EMBEDDER, prompts={"query": "query: ", "查询": "查"}, default_prompt="passage: ")

EMPTY = "Input validation error: `inputs` cannot be empty"
TOO_MANY_CHARS = "Input validation error: `inputs` must have less than 2000 characters. Given: 2001"
NOT_A_CLASSIFIER = "Backend error: Model is not a classifier model"
NOT_AN_EMBEDDER = "Backend error: Model is not an embedding model"
NOT_SPLADE = "Backend error: Model is not an embedding model with SPLADE pooling"


def refusal(check, *arguments, **options) -> str:
    with pytest.raises(TeiError) as error:
        check(*arguments, **options)
    return error.value.message


@pytest.mark.parametrize("input", [Input(""), Input("", truncate=True), Input("", "")])
def test_empty_input_is_refused(input):
    assert refusal(validation.check_input, EMBEDDER, input) == EMPTY


@pytest.mark.parametrize("input", [Input(" "), Input("\t\n"), Input("", "world"), Input("hello", "")])
def test_white_space_and_one_empty_side_are_no_empty_input(input):
    validation.check_input(EMBEDDER, input)


def test_text_at_the_limit_of_characters_is_tokenized():
    validation.check_input(EMBEDDER, Input("x" * 2000))


@pytest.mark.parametrize("input", [Input("x" * 2001), Input("x" * 2000, "x"), Input("😀" * 2001)])
def test_text_past_the_limit_of_characters_is_refused_unread(input):
    assert refusal(validation.check_input, EMBEDDER, input) == TOO_MANY_CHARS


def test_text_past_the_limit_of_characters_may_be_truncated():
    validation.check_input(EMBEDDER, Input("x" * 2001, truncate=True))


def test_tokenize_refuses_an_empty_text():
    assert refusal(validation.check_text, EMBEDDER, "") == EMPTY


def test_tokenize_refuses_a_text_past_the_limit_of_characters():
    assert refusal(validation.check_text, EMBEDDER, "x" * 2001) == TOO_MANY_CHARS


def test_tokens_may_be_as_many_as_the_limit():
    validation.check_tokens(8, 8)


def test_one_token_too_many_is_refused():
    expected = "Input validation error: `inputs` must have less than 8 tokens. Given: 9"
    assert refusal(validation.check_tokens, 9, 8) == expected


def test_no_token_at_all_is_refused():
    expected = "Input validation error: `inputs` must have at least 1 token. Given: 0"
    assert refusal(validation.check_tokens, 0, 8) == expected


def test_no_ids_are_refused():
    assert refusal(validation.check_ids, EMBEDDER, []) == "Input validation error: `input_ids` cannot be empty"


def test_more_ids_than_an_input_may_have_characters_are_refused():
    validation.check_ids(EMBEDDER, [0] * 2000)
    text = "Input validation error: `input_ids` must have less than 2000 ids. Given: 2001"
    assert refusal(validation.check_ids, EMBEDDER, [0] * 2001) == text


@pytest.mark.parametrize("dimensions", [None, 1, 32])
def test_dimensions_up_to_the_embedding_size_are_accepted(dimensions):
    validation.check_dimensions(dimensions, 32)


def test_no_dimensions_are_refused():
    assert refusal(validation.check_dimensions, 0, 32) == "Input validation error: `dimensions` should be positive"


@pytest.mark.parametrize("dimensions", [33, 2**32 - 1])
def test_more_dimensions_than_there_are_are_refused(dimensions):
    assert refusal(validation.check_dimensions, dimensions, 32) == (
        "Input validation error: `dimensions` should be smaller than the maximum embedding dimension. "
        f"Given: {dimensions}, maximum: 32"
    )


def test_named_prompt_wins_over_the_default():
    assert validation.resolve_prompt(PROMPTED, "query") == "query: "
    assert validation.resolve_prompt(PROMPTED, None) == "passage: "
    assert validation.resolve_prompt(EMBEDDER, None) == ""


@pytest.mark.parametrize("name", ["nope", ""])
def test_unknown_prompt_is_refused_with_the_names_there_are(name):
    assert refusal(validation.check_input, PROMPTED, Input("x", prompt_name=name)) == (
        f"Input validation error: `prompt_name` is set to `{name}` but it was not found in the Sentence Transformers "
        'prompts. Available prompts: ["query", "查询"]'
    )


def test_prompt_of_a_model_without_prompts_is_refused():
    assert refusal(validation.check_input, EMBEDDER, Input("x", prompt_name="query")) == (
        "Input validation error: `prompt_name` is set to `query` but no prompts were found in the Sentence "
        "Transformers configuration"
    )


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        (EMBEDDER, Kind.PREDICT, NOT_A_CLASSIFIER),
        (SPLADE, Kind.PREDICT, NOT_A_CLASSIFIER),
        (RERANKER, Kind.EMBED, NOT_AN_EMBEDDER),
        (CLASSIFIER, Kind.EMBED_ALL, NOT_AN_EMBEDDER),
        (EMBEDDER, Kind.EMBED_SPARSE, NOT_SPLADE),
        (RERANKER, Kind.EMBED_SPARSE, NOT_SPLADE),
        (SPLADE, Kind.EMBED_ALL, "Backend error: `embed_all` is not available for SPLADE models"),
    ],
)
def test_request_that_does_not_fit_the_model_is_refused(model, kind, text):
    with pytest.raises(ModelTypeError) as error:
        validation.check_kind(model, kind)
    assert error.value.message == text


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (EMBEDDER, Kind.EMBED),
        (EMBEDDER, Kind.EMBED_ALL),
        (SPLADE, Kind.EMBED),
        (SPLADE, Kind.EMBED_SPARSE),
        (RERANKER, Kind.PREDICT),
        (CLASSIFIER, Kind.PREDICT),
    ],
)
def test_request_that_fits_the_model_is_accepted(model, kind):
    validation.check_kind(model, kind)


def test_sparse_model_does_not_normalize():
    text = refusal(validation.check_kind, SPLADE, Kind.EMBED, normalize=True)
    assert text == "Backend error: `normalize` is not available for SPLADE models"


def test_only_one_label_makes_a_reranker():
    validation.check_reranker(RERANKER)
    assert refusal(validation.check_reranker, CLASSIFIER) == "model is not a re-ranker model"
    assert refusal(validation.check_reranker, EMBEDDER) == "model is not a classifier model"


@pytest.mark.parametrize("number", [0, 3])
def test_pair_is_one_text_or_two(number):
    validation.check_arity(["x"])
    validation.check_arity(["x", "x"])
    text = refusal(validation.check_arity, ["x"] * number)
    assert text == f"`inputs` must have a single or two elements. Given: {number}"


def test_rerank_without_texts_is_refused():
    assert refusal(validation.check_texts, [], 32) == "`texts` cannot be empty"


def test_rerank_of_too_many_texts_is_refused():
    validation.check_texts(["x"] * 32, 32)
    assert refusal(validation.check_texts, ["x"] * 33, 32) == "batch size 33 > maximum allowed batch size 32"


def test_refused_input_is_a_validation_error():
    with pytest.raises(ValidationError):
        validation.check_texts([], 32)
