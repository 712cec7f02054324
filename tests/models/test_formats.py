"""Our outputs equal those of composed references for formats that only the publisher's code reads."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tei_grpc.errors import StartupError
from tei_grpc.models import Blueprint, Head, find_family
from tei_grpc.types import Kind
from tests.checkpoints import SIZES
from tests.models.conftest import MakeCheckpoint
from tests.models.formats import FORMATS, TASKS, alibaba_new, jina_reranker_v2, jina_v3_adapted
from tests.models.runners import load_runner, normalized, random_ids, reference, run

TEXTS = random_ids(1, 2, 7, 8, 9, 16, 33, 70)


@pytest.mark.parametrize("name", FORMATS)
def test_token_vectors_equal_the_composed_reference(tmp_path: Path, name: str) -> None:
    expected = reference(FORMATS[name](tmp_path), TEXTS)
    found = run(load_runner(tmp_path, pooling="mean"), Kind.EMBED_ALL, TEXTS)
    for (vectors,), hidden in zip(found, expected, strict=True):
        np.testing.assert_allclose(vectors, hidden, atol=1e-4, rtol=0)
        np.testing.assert_allclose(normalized(vectors), normalized(hidden), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16_stays_close_to_the_composed_reference(tmp_path: Path, name: str) -> None:
    expected = reference(FORMATS[name](tmp_path), TEXTS)
    found = run(load_runner(tmp_path, pooling="mean", dtype="bfloat16"), Kind.EMBED_ALL, TEXTS)
    for (vectors,), hidden in zip(found, expected, strict=True):
        assert np.min(np.sum(normalized(vectors) * normalized(hidden), axis=-1)) >= 0.999


@pytest.mark.parametrize("name", FORMATS)
def test_text_in_a_mixed_batch_gets_what_it_gets_alone(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path)
    runner = load_runner(tmp_path, pooling="mean")
    for text, (together,) in zip(TEXTS, run(runner, Kind.EMBED, TEXTS), strict=True):
        ((alone,),) = run(runner, Kind.EMBED, [text])
        np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
        np.testing.assert_allclose(normalized(together), normalized(alone), atol=1e-6, rtol=0)


def test_modernbert_reads_the_config_of_transformers_4(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    old = {"global_attn_every_n_layers": 2, "global_rope_theta": 160000.0, "local_rope_theta": 300.0}
    types = ["full_attention", "sliding_attention"] * 2
    thetas = {"full_attention": {"rope_theta": 160000.0}, "sliding_attention": {"rope_theta": 300.0}}
    shutil.copytree(checkpoint("modernbert"), tmp_path, dirs_exist_ok=True)
    saved = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in saved.items() if key not in ("layer_types", "rope_parameters")}
    (tmp_path / "config.json").write_text(json.dumps({**saved, "layer_types": types, "rope_parameters": thetas}))
    expected = reference(transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval(), TEXTS)
    (tmp_path / "config.json").write_text(json.dumps({**kept, **old}))
    for (vectors,), hidden in zip(run(load_runner(tmp_path), Kind.EMBED_ALL, TEXTS), expected, strict=True):
        np.testing.assert_allclose(vectors, hidden, atol=1e-4, rtol=0)


def test_reranker_of_the_format_new_scores_as_gte(tmp_path: Path) -> None:
    expected = reference(alibaba_new(tmp_path, head="ForSequenceClassification"), TEXTS)
    for (logits,), scores in zip(run(load_runner(tmp_path), Kind.PREDICT, TEXTS), expected, strict=True):
        np.testing.assert_allclose(logits, scores, atol=1e-5, rtol=0)


def test_jina_reranker_v2_scores_as_xlm_roberta(tmp_path: Path) -> None:
    expected = reference(jina_reranker_v2(tmp_path), TEXTS)
    for (logits,), scores in zip(run(load_runner(tmp_path), Kind.PREDICT, TEXTS), expected, strict=True):
        np.testing.assert_allclose(logits, scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("task", TASKS)
def test_lora_task_is_merged_into_the_weights(tmp_path: Path, task: str) -> None:
    expected = reference(jina_v3_adapted(tmp_path, task=task), TEXTS)
    runner = load_runner(tmp_path, pooling="mean", lora_task=task)
    for (vectors,), hidden in zip(run(runner, Kind.EMBED_ALL, TEXTS), expected, strict=True):
        np.testing.assert_allclose(vectors, hidden, atol=1e-4, rtol=0)


def test_unknown_lora_task_is_refused_with_those_there_are(tmp_path: Path) -> None:
    jina_v3_adapted(tmp_path)
    with pytest.raises(StartupError, match=r"`--lora-task` 'ranking'.*it has: retrieval.query, separation"):
        load_runner(tmp_path, pooling="mean", lora_task="ranking")


def test_lora_task_of_a_model_without_adaptations_is_refused(tmp_path: Path) -> None:
    alibaba_new(tmp_path)
    with pytest.raises(StartupError, match="it has none"):
        load_runner(tmp_path, pooling="mean", lora_task="ranking")


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("new", "layer_norm_type", "rms_norm"),
        ("new", "logn_attention_scale", True),
        ("new", "position_embedding_type", "absolute"),
        ("gte", "pack_qkv", False),
        ("gte", "rope_scaling", {"type": "longrope", "factor": 2.0}),
        ("nomic_bert", "prenorm", True),
        ("nomic_bert", "rotary_emb_interleaved", True),
        ("nomic_bert", "moe_normalize_expert_weights", True),
        ("nomic_bert", "hidden_act", "laplace"),
        ("jina_embeddings_v3", "hidden_act", "laplace"),
        ("modernbert", "layer_types", ["full_attention", "chunked_attention"]),
        ("modernbert", "rope_parameters", {"full_attention": {"rope_type": "longrope"}}),
    ],
)
def test_value_that_a_family_does_not_implement_is_refused(model_type: str, key: str, value: object) -> None:
    config = {**SIZES, "model_type": model_type, key: value}
    given = next(iter(value.values())) if isinstance(value, dict) else value
    named = given.get("rope_type") if isinstance(given, dict) else str(given)
    with torch.device("meta"), pytest.raises(StartupError, match=re.escape(named)):
        find_family(config)(Blueprint(config, Head.NONE, 0, frozenset()))


def test_classifier_pooling_that_is_not_known_is_refused() -> None:
    config = {**SIZES, "model_type": "modernbert", "classifier_pooling": "max"}
    with torch.device("meta"), pytest.raises(StartupError, match="`classifier_pooling` 'max'"):
        find_family(config)(Blueprint(config, Head.CLASSIFICATION, 1, frozenset()))
