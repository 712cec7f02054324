"""Jina's BERT v2, which transformers reads as plain BERT."""

import json
from pathlib import Path

import numpy as np
import pytest

from tei_grpc.errors import StartupError
from tei_grpc.models import find_family
from tei_grpc.types import Kind
from tests.models.jina_bert import config, jina_bert
from tests.models.runners import load_runner, normalized, random_ids, reference, run

TEXTS = random_ids(1, 2, 7, 16, 33, 70)


@pytest.mark.parametrize("code", [False, True])
def test_token_vectors_equal_the_definition(tmp_path: Path, code: bool) -> None:
    expected = reference(jina_bert(tmp_path, code=code), TEXTS)
    found = run(load_runner(tmp_path, pooling="mean"), Kind.EMBED_ALL, TEXTS)
    for (vectors,), hidden in zip(found, expected, strict=True):
        np.testing.assert_allclose(vectors, hidden, atol=1e-4, rtol=0)
        np.testing.assert_allclose(normalized(vectors), normalized(hidden), atol=1e-5, rtol=0)


@pytest.mark.parametrize("code", [False, True])
def test_bfloat16_stays_close_to_the_definition_in_float32(tmp_path: Path, code: bool) -> None:
    expected = reference(jina_bert(tmp_path, code=code), TEXTS)
    found = run(load_runner(tmp_path, pooling="mean", dtype="bfloat16"), Kind.EMBED, TEXTS)
    for (vector,), hidden in zip(found, expected, strict=True):
        assert np.sum(normalized(vector) * normalized(hidden.mean(0))) >= 0.999


@pytest.mark.parametrize("code", [False, True])
def test_reranker_scores_as_the_definition(tmp_path: Path, code: bool) -> None:
    expected = reference(jina_bert(tmp_path, code=code, reranker=True), TEXTS)
    for (logits,), scores in zip(run(load_runner(tmp_path), Kind.PREDICT, TEXTS), expected, strict=True):
        np.testing.assert_allclose(logits, scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("code", [False, True])
def test_text_in_a_mixed_batch_gets_what_it_gets_alone(tmp_path: Path, code: bool) -> None:
    jina_bert(tmp_path, code=code)
    runner = load_runner(tmp_path, pooling="mean")
    for text, (together,) in zip(TEXTS, run(runner, Kind.EMBED, TEXTS), strict=True):
        ((alone,),) = run(runner, Kind.EMBED, [text])
        np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
        np.testing.assert_allclose(normalized(together), normalized(alone), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "said",
    [
        {"auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"}},
        {"auto_map": {"AutoModel": "modeling_bert.JinaBertModel"}},  # the code lies beside the weights
        {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"},
    ],
)
def test_checkpoint_that_names_the_code_of_jina_is_not_plain_bert(said: dict[str, object]) -> None:
    assert find_family({"model_type": "bert", **said}).__name__ == "JinaBert"


@pytest.mark.parametrize(
    "said", [{}, {"auto_map": None, "_name_or_path": None}, {"_name_or_path": "bert-base-uncased"}]
)
def test_other_bert_stays_bert(said: dict[str, object]) -> None:
    assert find_family({"model_type": "bert", **said}).__name__ == "Bert"


@pytest.mark.parametrize(("key", "value"), [("feed_forward_type", "original"), ("position_embedding_type", "absolute")])
def test_config_that_asks_for_something_else_is_refused(tmp_path: Path, key: str, value: str) -> None:
    jina_bert(tmp_path, code=False)
    (tmp_path / "config.json").write_text(json.dumps({**config(code=False), key: value}))
    with pytest.raises(StartupError, match=f"`{key}` '{value}' in config.json is not supported"):
        load_runner(tmp_path, pooling="mean")
