"""What decoder-shaped checkpoints say in other ways than transformers writes them, or only with remote code."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tei_grpc.errors import StartupError
from tei_grpc.types import Kind
from tests.models.conftest import MakeCheckpoint
from tests.models.runners import load_runner, random_ids, reference, run

TEXTS = random_ids(1, 2, 7, 16, 33, 70)


def variant(
    source: Path,
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """A copy of a checkpoint with other keys in config.json and with more tensors."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    keys = {key: value for key, value in read_config(folder).items() if key not in without}
    (folder / "config.json").write_text(json.dumps({**keys, **(config or {})}))
    if tensors:
        save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def encoder(folder: Path, model_class: type = transformers.AutoModel) -> torch.nn.Module:
    return model_class.from_pretrained(folder, attn_implementation="eager").eval()


def assert_tokens_equal(folder: Path, expected: list[np.ndarray]) -> None:
    for (found,), hidden in zip(run(load_runner(folder), Kind.EMBED_ALL, TEXTS), expected, strict=True):
        np.testing.assert_allclose(found, hidden, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "llama-dynamic-rope", "eurobert"])
def test_rope_of_an_older_config_is_read(checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    scaling = read_config(checkpoint(name))["rope_parameters"]
    scaling["type"] = scaling.pop("rope_type")
    older = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling if len(scaling) > 1 else None}
    folder = variant(checkpoint(name), tmp_path, config=older, without=("rope_parameters", "layer_types"))
    assert_tokens_equal(folder, reference(encoder(checkpoint(name)), TEXTS))


@pytest.mark.parametrize("pattern", [{}, {"sliding_window_pattern": 2}])
def test_gemma_of_an_older_config_is_read(checkpoint: MakeCheckpoint, tmp_path: Path, pattern: dict[str, int]) -> None:
    older = {"rope_theta": 5e5, "rope_local_base_freq": 500.0, **pattern}
    older["rope_scaling"] = {"rope_type": "linear", "factor": 3.0}
    folder = variant(checkpoint("gemma3"), tmp_path, config=older, without=("rope_parameters", "layer_types"))
    assert_tokens_equal(folder, reference(encoder(folder), TEXTS))


def test_gemma_thetas_differ_by_layer_type(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    types = {"full_attention": {"rope_theta": 777.0}, "sliding_attention": {"rope_theta": 33.0}}
    parameters = {name: {"rope_type": "default", **theta} for name, theta in types.items()}
    folder = variant(checkpoint("gemma3"), tmp_path, config={"rope_parameters": parameters})
    assert_tokens_equal(folder, reference(encoder(folder), TEXTS))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_use_bidirectional_attention_does_what_is_causal_false_does(
    checkpoint: MakeCheckpoint, tmp_path: Path, name: str
) -> None:
    ours = variant(checkpoint(name), tmp_path / "ours", config={"use_bidirectional_attention": True})
    theirs = variant(checkpoint(name), tmp_path / "theirs", config={"is_causal": False})
    assert_tokens_equal(ours, reference(encoder(theirs), TEXTS))


@pytest.mark.parametrize("name", ["mistral-three-labels", "qwen2-three-labels", "qwen3-one-label", "gemma3-one-label"])
def test_text_that_ends_in_pad_tokens_is_scored_on_the_token_before(checkpoint: MakeCheckpoint, name: str) -> None:
    texts = [np.array(ids, np.int32) for ids in ([11, 12, 0, 0], [13], [0, 0], [14, 0, 15])]
    expected = reference(encoder(checkpoint(name), transformers.AutoModelForSequenceClassification), texts)
    for (found,), logits in zip(run(load_runner(checkpoint(name)), Kind.PREDICT, texts), expected, strict=True):
        np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)


def test_voyage_projects_every_token(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    linear = torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    source = checkpoint("qwen3-bidirectional")
    folder = variant(source, tmp_path, config={"num_labels": 12}, tensors={"linear.weight": linear})
    assert_tokens_equal(folder, [hidden @ linear.numpy().T for hidden in reference(encoder(source), TEXTS)])
    assert load_runner(folder).facts.embedding_size == 12


def test_pplx_rounds_pooled_vectors_to_whole_numbers(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("qwen3-bidirectional")
    other = {"model_type": "bidirectional_pplx_qwen3", "auto_map": {"AutoModel": "modeling.PPLXQwen3Model"}}
    folder = variant(source, tmp_path, config=other, without=("is_causal",))
    modules = json.loads((folder / "modules.json").read_text())
    modules[2] = {"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer"}
    (folder / "modules.json").write_text(json.dumps(modules))
    hidden = reference(encoder(source), TEXTS)
    assert_tokens_equal(folder, hidden)
    for (found,), tokens in zip(run(load_runner(folder), Kind.EMBED, TEXTS), hidden, strict=True):
        exact = 127 * np.tanh(tokens.mean(0))
        assert np.array_equal(found, np.round(found))
        np.testing.assert_allclose(found, exact, atol=0.501, rtol=0)


POOLERS = {"avg": lambda hidden: hidden.mean(0), "cls": lambda hidden: hidden[0], "last": lambda hidden: hidden[-1]}


@pytest.mark.parametrize("pooling", POOLERS)
def test_bidirectional_llama_scores_its_pooled_vector(checkpoint: MakeCheckpoint, tmp_path: Path, pooling: str) -> None:
    score = load_file(checkpoint("llama-one-label") / "model.safetensors")["score.weight"].numpy()
    bidirectional = variant(checkpoint("llama-one-label"), tmp_path / "native", config={"is_causal": False})
    expected = [score @ POOLERS[pooling](hidden) / 0.2 for hidden in reference(encoder(bidirectional), TEXTS)]
    nvidia = {"model_type": "llama_bidirec", "pooling": pooling, "temperature": 0.2}
    folder = variant(checkpoint("llama-one-label"), tmp_path / "nvidia", config=nvidia)
    for (found,), logits in zip(run(load_runner(folder), Kind.PREDICT, TEXTS), expected, strict=True):
        np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)


def test_question_answering_llama_loads_as_an_encoder(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    tensors = load_file(checkpoint("llama-tokens") / "model.safetensors")
    renamed = {
        name.replace("model.", "transformer."): tensor for name, tensor in tensors.items() if "score" not in name
    }
    folder = variant(checkpoint("llama-tokens"), tmp_path, config={"architectures": ["LlamaForQuestionAnswering"]})
    save_file({**renamed, "qa_outputs.weight": torch.ones(2, 32)}, folder / "model.safetensors")
    assert_tokens_equal(folder, reference(encoder(checkpoint("llama-tokens")), TEXTS))


def test_stored_rotary_buffers_are_harmless(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(3)}
    folder = variant(checkpoint("llama-tokens"), tmp_path, tensors=buffers)
    assert_tokens_equal(folder, reference(encoder(checkpoint("llama-tokens")), TEXTS))


def test_eurobert_of_remote_code_names_its_classifier_pooling_otherwise(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = checkpoint("eurobert-mean-one-label")
    folder = variant(source, tmp_path, config={"clf_pooling": "mean"}, without=("classifier_pooling",))
    expected = reference(encoder(source, transformers.AutoModelForSequenceClassification), TEXTS)
    for (found,), logits in zip(run(load_runner(folder), Kind.PREDICT, TEXTS), expected, strict=True):
        np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)


def test_remote_code_of_gte_qwen2_without_a_direction_is_warned_about(
    checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = variant(checkpoint("qwen2"), tmp_path, config={"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}})
    load_runner(folder)
    assert "has no `is_causal`" in caplog.text


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope type `longrope`"),
        ("llama", {"hidden_act": "mish"}, "`mish`"),
        ("llama", {"model_type": "llama_bidirec", "pooling": "colbert"}, "`pooling` 'colbert'"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "'linear_attention'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` 50.0"),
        ("eurobert-three-labels", {"classifier_pooling": "max"}, "`classifier_pooling` 'max'"),
    ],
)
def test_unsupported_value_is_refused_by_name(
    checkpoint: MakeCheckpoint, tmp_path: Path, name: str, config: dict[str, Any], named: str
) -> None:
    folder = variant(checkpoint(name), tmp_path, config=config)
    with pytest.raises(StartupError, match=named):
        load_runner(folder)
