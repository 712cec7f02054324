"""Rerankers that are language models score a pair as sentence-transformers and transformers do."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import StartupError, ValidationError
from tei_grpc.loading.chat_template import qwen3_reranker
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Input, Kind, ModelType, Scoring, TruncationDirection
from tests.folders import write_json
from tests.language_models import make_language_model, make_reranker, make_tokenizer, write_logit_score
from tests.models.runners import load_runner, run

PAIRS = [
    ("where do the tigers live?", "in the woods of Siberia"),
    ("where do the tigers live?", "no"),
    ("hello", ""),
    ("hello ", "  world, twice the world\n"),
    ("北京", "the capital"),
]
LONG = ("hello", "world " * 200)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def encode(folder: Path, *pairs: tuple[str, str | None], truncate: bool = False, **options: object) -> list[np.ndarray]:
    side = TruncationDirection(options.pop("side", "right"))
    config = EngineConfig(model_id=str(folder), tokenization_workers=1, **options)
    tokenizer = Tokenizer(read_model_config(folder, config), config)
    try:
        return [asyncio.run(tokenizer.encode(Input(*pair, truncate, side))).input_ids for pair in pairs]
    finally:
        tokenizer.close()


def logits(folder: Path, pairs: Sequence[tuple[str, str]], *, truncate: bool = False, **options: object) -> np.ndarray:
    ids = encode(folder, *pairs, truncate=truncate, **options)
    return np.array([found[0] for (found,) in run(load_runner(folder, **options), Kind.PREDICT, ids)])


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def assert_scores_are_those_of_sentence_transformers(folder: Path, pairs: Sequence[tuple[str, str]]) -> None:
    expected = CrossEncoder(str(folder)).predict(list(pairs))
    found = sigmoid(logits(folder, pairs, truncate=True))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert np.argsort(found).tolist() == np.argsort(expected).tolist()


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama", "Mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_logit_score_is_that_of_sentence_transformers(tmp_path: Path, family: str, *, tied: bool) -> None:
    make_reranker(tmp_path, f"{family}ForCausalLM", tie_word_embeddings=tied)
    assert_scores_are_those_of_sentence_transformers(tmp_path, PAIRS)


def test_logit_score_of_one_token_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    make_reranker(tmp_path, "Qwen3ForCausalLM")
    write_logit_score(tmp_path, false=None)
    assert_scores_are_those_of_sentence_transformers(tmp_path, PAIRS)


@pytest.mark.parametrize("model", ["Qwen3", "Llama", "Mistral", "Gemma3Text"])
def test_sequence_classifier_with_a_template_scores_as_in_sentence_transformers(tmp_path: Path, model: str) -> None:
    make_reranker(tmp_path, f"{model}ForSequenceClassification")
    assert_scores_are_those_of_sentence_transformers(tmp_path, PAIRS)


@pytest.mark.parametrize("model", ["Qwen3ForCausalLM", "Qwen3ForSequenceClassification"])
def test_cut_document_scores_as_in_sentence_transformers(tmp_path: Path, model: str) -> None:
    make_reranker(tmp_path, model)
    assert_scores_are_those_of_sentence_transformers(tmp_path, [LONG, *PAIRS])


def test_default_prompt_of_the_checkpoint_is_the_instruction(tmp_path: Path) -> None:
    make_reranker(tmp_path, "Qwen3ForCausalLM")
    prompts = {"prompts": {"code": "Find code"}, "default_prompt_name": "code", "model_type": "CrossEncoder"}
    plain = logits(tmp_path, PAIRS)
    write_json(tmp_path / "config_sentence_transformers.json", prompts)
    assert_scores_are_those_of_sentence_transformers(tmp_path, PAIRS)
    assert np.abs(logits(tmp_path, PAIRS) - plain).max() > 1e-3


def original(parent: Path, name: str = "Qwen3-Reranker-0.6B", **config: object) -> Path:
    """As Qwen published it: nothing but a causal language model. Its name is all that says what it is for."""
    (parent / name).mkdir()
    return make_language_model(parent / name, "Qwen3ForCausalLM", limit=600, **config)


def documented(query: str, document: str, keep: int | None = None) -> list[int]:
    """Token ids as the model card makes them: three pieces, of which the middle one gives way at its end."""
    tokenizer = make_tokenizer()
    body = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    pieces = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in (PREFIX, body, SUFFIX)]
    return pieces[0] + pieces[1][:keep] + pieces[2]


def yes_over_no(folder: Path, ids: list[int]) -> float:
    """Logit of `yes` less that of `no` after the last token, by transformers."""
    tokenizer = make_tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        last = model(torch.tensor([ids])).logits[0, -1]
    return float(last[tokenizer.token_to_id("yes")] - last[tokenizer.token_to_id("no")])


@pytest.mark.parametrize("tied", [True, False])
def test_original_qwen3_reranker_scores_by_its_documented_template(tmp_path: Path, *, tied: bool) -> None:
    folder = original(tmp_path, tie_word_embeddings=tied)
    expected = [yes_over_no(folder, documented(*pair)) for pair in PAIRS]
    np.testing.assert_allclose(logits(folder, PAIRS), expected, atol=1e-4, rtol=0)


def test_original_qwen3_reranker_is_known_by_its_option_too(tmp_path: Path) -> None:
    folder = original(tmp_path, "judge")
    expected = [yes_over_no(folder, documented(*pair)) for pair in PAIRS]
    np.testing.assert_allclose(logits(folder, PAIRS, chat_template="qwen3-reranker"), expected, atol=1e-4, rtol=0)


def test_start_says_what_decides_the_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    read_model_config(folder := original(tmp_path), EngineConfig(model_id=str(folder)))
    assert "the template that Qwen3-Reranker documents, because the model is called so" in caplog.text
    assert f"token {make_tokenizer().token_to_id('yes')} (yes)" in caplog.text


def test_language_model_that_says_nothing_is_not_guessed_to_be_a_reranker(tmp_path: Path) -> None:
    folder = original(tmp_path, "judge")
    with pytest.raises(StartupError, match="no pooling configuration"):
        read_model_config(folder, EngineConfig(model_id=str(folder)))


def test_language_model_with_a_pooling_stays_an_embedder(tmp_path: Path) -> None:
    folder = original(tmp_path)
    config = EngineConfig(model_id=str(folder), pooling="last-token")
    assert read_model_config(folder, config).kind is ModelType.EMBEDDING


def test_long_document_loses_its_end_and_nothing_else(tmp_path: Path) -> None:
    folder = original(tmp_path)
    (ids,) = encode(folder, LONG, truncate=True)
    whole = documented(*LONG)
    room = 600 - len(documented("", "", 0))
    assert len(ids) == 600
    assert ids.tolist() == documented(*LONG, keep=room)
    assert len(whole) > 600


def test_long_document_cut_on_the_left_loses_its_beginning_and_nothing_else(tmp_path: Path) -> None:
    folder = original(tmp_path)
    (ids,) = encode(folder, LONG, truncate=True, side="left")
    whole = documented(*LONG)
    head = len(make_tokenizer().encode(PREFIX + f"<Instruct>: {INSTRUCTION}\n<Query>: hello\n<Document>:").ids)
    assert ids.tolist() == whole[:head] + whole[len(whole) - (600 - head) :]


def test_long_document_is_refused_unless_it_may_be_cut(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="`inputs` must have less than 600 tokens. Given: "):
        encode(original(tmp_path), LONG)


def test_query_is_never_cut(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="`inputs` must have less than 600 tokens"):
        encode(original(tmp_path), (LONG[1], "world"), truncate=True)


def test_single_text_is_taken_as_a_template_that_the_caller_has_filled(tmp_path: Path) -> None:
    folder = original(tmp_path)
    query, document = PAIRS[0]
    by_caller = PREFIX + f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}" + SUFFIX
    single, pair = encode(folder, (by_caller, None), PAIRS[0])
    assert single.tolist() == pair.tolist()


def test_text_of_the_pair_is_not_read_as_jinja(tmp_path: Path) -> None:
    query = "{{ messages }} {% raw %}"
    assert encode(original(tmp_path), (query, "{{ 7 * 7 }}"))[0].tolist() == documented(query, "{{ 7 * 7 }}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_pair_in_a_mixed_batch_scores_as_alone(tmp_path: Path, dtype: str) -> None:
    make_reranker(tmp_path, "Qwen3ForCausalLM")
    runner, texts = load_runner(tmp_path, dtype=dtype), encode(tmp_path, *PAIRS)
    for text, (together,) in zip(texts, run(runner, Kind.PREDICT, texts), strict=True):
        ((alone,),) = run(runner, Kind.PREDICT, [text])
        np.testing.assert_allclose(together, alone, atol=1e-5 if dtype == "float32" else 0.02, rtol=0)


def test_classifier_without_a_place_for_the_pair_in_its_template_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    make_reranker(tmp_path, "Qwen3ForSequenceClassification", template=template)
    assert read_model_config(tmp_path, EngineConfig(model_id=str(tmp_path))).template is None
    assert "has no place for a query and a document" in caplog.text


def test_logit_score_without_a_template_is_refused(tmp_path: Path) -> None:
    make_language_model(tmp_path, "Qwen3ForCausalLM")
    write_logit_score(tmp_path)
    with pytest.raises(StartupError, match="has no template for a pair; give `--chat-template`"):
        read_model_config(tmp_path, EngineConfig(model_id=str(tmp_path)))


def test_score_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    make_reranker(tmp_path, "Qwen3ForCausalLM")
    write_logit_score(tmp_path, false=5000)
    with pytest.raises(StartupError, match="5000"):
        load_runner(tmp_path)


def test_chat_template_of_an_embedder_is_refused(tmp_path: Path) -> None:
    make_language_model(tmp_path, "Qwen3Model")
    options = {"pooling": "mean", "chat_template": "qwen3-reranker"}
    with pytest.raises(StartupError, match="`--chat-template` is for rerankers"):
        read_model_config(tmp_path, EngineConfig(model_id=str(tmp_path), **options))


def test_plain_special_tokens_do_not_go_with_a_template(tmp_path: Path) -> None:
    make_reranker(tmp_path, "Qwen3ForCausalLM")
    with pytest.raises(StartupError, match="`--split-special-tokens`"):
        read_model_config(tmp_path, EngineConfig(model_id=str(tmp_path), split_special_tokens=True))


def test_qwen3_template_takes_another_instruction() -> None:
    assert "<Instruct>: Find code\n" in qwen3_reranker("Find code").prefix
    assert f"<Instruct>: {INSTRUCTION}\n" in qwen3_reranker(None).prefix


async def test_engine_ranks_as_sentence_transformers(tmp_path: Path) -> None:
    make_reranker(tmp_path, "Qwen3ForCausalLM")
    texts = ["in the woods", "no", "yes her world", LONG[1]]
    async with Engine(EngineConfig(model_id=str(tmp_path))) as engine:
        result = await engine.rerank("hello", texts, scoring=Scoring(truncate=True))
        single = await engine.predict("<|im_start|>hello<|im_end|>")
    expected = CrossEncoder(str(tmp_path)).predict([("hello", text) for text in texts])
    assert [rank.index for rank in result.ranks] == np.argsort(-expected).tolist()
    np.testing.assert_allclose([rank.score for rank in result.ranks], np.sort(expected)[::-1], atol=1e-5, rtol=0)
    assert [label for _, label in single.predictions] == ["LABEL_0"]
