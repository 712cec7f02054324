"""A checkpoint that talks nonsense is read or refused, by name; its code is never run."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError
from tei_grpc.loading.model_config import read_model_config
from tests import folders
from tests.fakes import FakeDevice
from tests.unit.loading.descriptions import read, refusal

FILES = (
    "config.json",
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "tokenizer_config.json",
    "config_sentence_transformers.json",
)
KEYS = {
    "config.json": ("model_type", "architectures", "id2label", "num_labels", "max_position_embeddings", "pad_token_id"),
    "1_Pooling/config.json": ("pooling_mode", "pooling_mode_cls_token", "include_prompt"),
    "sentence_bert_config.json": ("max_seq_length", "do_lower_case"),
    "tokenizer_config.json": ("model_max_length",),
    "config_sentence_transformers.json": ("prompts", "default_prompt_name"),
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_or_refuse(folder: Path) -> None:
    """Whatever the files say: a ModelConfig that makes sense, or a StartupError."""
    try:
        model = read(folder)
    except StartupError:
        return
    assert model.max_input_length > 0
    assert all(isinstance(text, str) for text in (*model.labels, *model.architectures, *model.prompts.values()))


@QUICK
@given(file=st.sampled_from(FILES), content=VALUES)
def test_any_json_in_any_file_is_read_or_refused(tmp_path, file, content):
    folder = folders.embedder(tmp_path, architectures=["BertForSequenceClassification"])
    folders.write_json(folder / file, content)
    read_or_refuse(folder)
    (folder / file).unlink()


@QUICK
@given(place=st.sampled_from([(file, key) for file, keys in KEYS.items() for key in keys]), value=VALUES)
@example(place=("config.json", "max_position_embeddings"), value=True)
@example(place=("config_sentence_transformers.json", "prompts"), value={"query": None})
@example(place=("1_Pooling/config.json", "pooling_mode"), value=[{}])
@pytest.mark.parametrize("head", ["BertModel", "BertForSequenceClassification"])
def test_any_value_of_any_key_is_read_or_refused(tmp_path, head, place, value):
    file, key = place
    folder = folders.embedder(tmp_path, architectures=[head], model_type="roberta", pad_token_id=1)
    folders.write_json(
        folder / file, {**(json.loads((folder / file).read_text()) if (folder / file).exists() else {}), key: value}
    )
    read_or_refuse(folder)
    (folder / file).unlink()


@pytest.mark.parametrize("file", FILES)
def test_lfs_pointer_in_place_of_a_file_is_named(tmp_path, file):
    folder = folders.embedder(tmp_path)
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 134\n")
    assert refusal(folder) == f"{folder / file} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[" * 100_000, b"null", b"3", b"[3]"])
def test_broken_file_is_named(tmp_path, file, content):
    folder = folders.embedder(tmp_path)
    (folder / file).write_bytes(content)
    assert Path(file).name in refusal(folder)


def test_folder_in_place_of_a_file_is_named(tmp_path):
    folder = folders.embedder(tmp_path)
    (folder / "modules.json").mkdir()
    assert "modules.json" in refusal(folder)


def test_missing_config_is_named(tmp_path):
    assert refusal(tmp_path) == f"`config.json` not found in `{tmp_path}`"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("architectures", "BertModel", "`config.json`: `architectures` must be a list, not 'BertModel'"),
        ("architectures", [1], "`config.json`: `architectures` must be a list of strings, not [1]"),
        (
            "max_position_embeddings",
            "512",
            "`config.json`: `max_position_embeddings` must be a whole number, not '512'",
        ),
    ],
)
def test_value_of_the_wrong_type_is_named(tmp_path, key, value, text):
    assert refusal(folders.embedder(tmp_path, **{key: value})) == text


async def test_code_of_the_checkpoint_is_never_run(tmp_path):
    marker = tmp_path / "marker"
    folder = folders.embedder(
        tmp_path / "model", auto_map={"AutoModel": "modeling.Model", "AutoConfig": "modeling.Model"}
    )
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Model: pass\n")
    config = EngineConfig(model_id=str(folder))
    async with Engine(config, FakeDevice(read(folder), config)) as engine:
        await engine.embed("hello")
    assert not marker.exists()


@pytest.mark.parametrize("layers", [0, -1, 10**9])
def test_number_of_layers_that_no_model_has_is_refused(tmp_path, layers) -> None:
    folder = folders.embedder(tmp_path, num_hidden_layers=layers)
    with pytest.raises(StartupError, match="`num_hidden_layers` in `config.json` must be 1 to 1000"):
        read_model_config(folder, EngineConfig(model_id=str(folder)))


def test_pipe_in_the_place_of_a_file_is_refused(tmp_path) -> None:
    folder = folders.embedder(tmp_path)
    (folder / "modules.json").unlink(missing_ok=True)
    os.mkfifo(folder / "modules.json")
    with pytest.raises(StartupError, match=r"modules.json` is not a file"):
        read_model_config(folder, EngineConfig(model_id=str(folder)))
