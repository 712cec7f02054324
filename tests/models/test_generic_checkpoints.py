"""The generic path at checkpoints that are damaged, bring code of their own, or ask for what it lacks."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tei_grpc.errors import StartupError
from tei_grpc.types import Kind
from tests.checkpoints import BERT_SPECIAL, ONE_LABEL, write_tokenizer
from tests.models.architectures import edit_config, edit_tensors, make_architecture
from tests.models.conftest import MakeArchitecture
from tests.models.runners import TEXTS, load_runner, run

LAYER = "encoder.albert_layer_groups.0.albert_layers.0.ffn.bias"


def test_missing_tensor_is_named(albert: Path) -> None:
    edit_tensors(albert, lambda tensors: tensors.pop(LAYER))
    with pytest.raises(StartupError, match=f"lacks tensors: `{LAYER}`"):
        load_runner(albert)


def test_unexpected_tensor_is_named(albert: Path) -> None:
    edit_tensors(albert, lambda tensors: tensors.update({"linear.weight": torch.ones(2, 2)}))
    with pytest.raises(StartupError, match="unexpected tensors: `linear.weight`"):
        load_runner(albert)


def test_tensor_of_another_shape_is_named(albert: Path) -> None:
    edit_tensors(albert, lambda tensors: tensors.update({LAYER: torch.ones(7)}))
    with pytest.raises(StartupError, match=rf"another shape.*{LAYER} \(has \[7\], needs \[48\]\)"):
        load_runner(albert)


def test_missing_pooler_does_not_matter_to_token_vectors(albert: Path) -> None:
    ((before,),) = run(load_runner(albert), Kind.EMBED, TEXTS[:1])
    edit_tensors(albert, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("pooler")])
    ((after,),) = run(load_runner(albert), Kind.EMBED, TEXTS[:1])
    np.testing.assert_array_equal(before, after)


def test_missing_classifier_is_not_made_up(architecture: MakeArchitecture, tmp_path: Path) -> None:
    make_architecture("albert", tmp_path)
    edit_config(tmp_path, architectures=["AlbertForSequenceClassification"], **ONE_LABEL)
    with pytest.raises(StartupError, match="lacks tensors: `classifier.bias`"):
        load_runner(tmp_path)


def test_head_of_the_same_architecture_may_lie_unused(tmp_path: Path) -> None:
    make_architecture("albert", tmp_path, "ForMaskedLM")
    assert load_runner(tmp_path, pooling="cls").facts.embedding_size == 32


def test_truncated_weights_are_refused(albert: Path) -> None:
    file = albert / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartupError, match="damaged or cut short"):
        load_runner(albert)


def test_code_of_the_publisher_is_never_run(albert: Path) -> None:
    marker = albert / "marker"
    (albert / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    edit_config(albert, model_type="own", architectures=["OwnModel"], auto_map=auto_map)
    with pytest.raises(StartupError, match=r"`modeling_own.OwnModel`, and such code is never run.*'own'"):
        load_runner(albert)
    assert not marker.exists()


def test_architecture_behind_a_known_model_type_is_not_guessed(albert: Path) -> None:
    auto_map = {"AutoModel": "modeling_own.OwnModel"}
    edit_config(albert, architectures=["OwnModel"], auto_map=auto_map)
    with pytest.raises(StartupError, match="code is never run"):
        load_runner(albert)


def test_code_that_is_not_needed_is_left_alone(albert: Path) -> None:
    ((before,),) = run(load_runner(albert), Kind.EMBED, TEXTS[:1])
    marker = albert / "marker"
    (albert / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    edit_config(albert, auto_map={"AutoModel": "modeling_own.AlbertModel"})
    ((after,),) = run(load_runner(albert), Kind.EMBED, TEXTS[:1])
    np.testing.assert_array_equal(before, after)
    assert not marker.exists()


def test_unknown_model_type_is_refused_with_those_that_are_known(albert: Path) -> None:
    edit_config(albert, model_type="nonesuch")
    with pytest.raises(StartupError, match=r"'nonesuch' is not supported; supported are: .*bert.*roberta"):
        load_runner(albert, pooling="mean")


def test_decoder_that_needs_a_second_text_is_refused(tmp_path: Path) -> None:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(vocab_size=93, d_model=8, encoder_layers=1, decoder_layers=1, **heads)
    transformers.BartModel(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, BERT_SPECIAL, 40)
    with pytest.raises(StartupError, match="`model_type` bart is an encoder-decoder"):
        load_runner(tmp_path, pooling="mean")


def test_head_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    make_architecture("gpt2", tmp_path)
    edit_config(tmp_path, architectures=["GPT2ForMaskedLM"])
    with pytest.raises(StartupError, match="no masked language modelling for `model_type` gpt2"):
        load_runner(tmp_path, pooling="splade")


def test_missing_transformers_is_an_error_that_names_the_extra(albert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(StartupError, match=r"pip install 'tei-grpc\[generic\]'"):
        load_runner(albert)


def test_lora_task_is_refused(albert: Path) -> None:
    with pytest.raises(StartupError, match="`--lora-task`"):
        load_runner(albert, lora_task="any")
