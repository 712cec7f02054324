"""What a checkpoint says about itself, in every dialect, and what happens when it talks nonsense."""

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError
from tei_grpc.loading.model_config import ModelConfig, position_offset, read_labels, read_model_config
from tei_grpc.loading.sentence_transformers import read_pooling
from tei_grpc.types import ModelType, Pooling
from tests import folders
from tests.fakes import FakeDevice

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.base.modules."
OLD_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": OLD + "Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": OLD + "Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": OLD + "Dense"},
    {"idx": 3, "name": "3", "path": "3_LayerNorm", "type": OLD + "LayerNorm"},
    {"idx": 4, "name": "4", "path": "4_Normalize", "type": OLD + "Normalize"},
]
NEW_MODULES = [
    {"path": "", "type": NEW + "transformer.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"},
    {"path": "2_Dense", "type": NEW + "dense.Dense"},
    {"path": "3_LayerNorm", "type": NEW + "layer_norm.LayerNorm"},
    {"path": "4_Normalize", "type": NEW + "normalize.Normalize"},
]
PROMPTS = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query"}
SAVED_PROMPTS = {"config_sentence_transformers.json": PROMPTS}


def read(folder: Path, **options: object) -> ModelConfig:
    return read_model_config(folder, EngineConfig(model_id=str(folder), **options))


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(StartupError) as error:
        read(folder, **options)
    return error.value.message


def without_pooling(folder: Path, **config: object) -> Path:
    folders.embedder(folder, **config)
    (folder / "1_Pooling" / "config.json").unlink()
    return folder


# --- pooling


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}, (Pooling.MEAN,)),
        ({"embedding_dimension": 32, "pooling_mode": "cls"}, (Pooling.CLS,)),
        ({"pooling_mode": ["lasttoken"]}, (Pooling.LAST_TOKEN,)),
        ({"pooling_mode_cls_token": True}, (Pooling.CLS,)),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, (Pooling.MEAN,)),
        ({"pooling_mode_lasttoken": True}, (Pooling.LAST_TOKEN,)),
        ({"pooling_mode_max_tokens": True}, (Pooling.MAX,)),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, (Pooling.MEAN_SQRT_LEN,)),
        ({"pooling_mode_weightedmean_tokens": True}, (Pooling.WEIGHTED_MEAN,)),
        ({"word_embedding_dimension": 32}, (Pooling.MEAN,)),
        ({"pooling_mode": ["max", "cls"]}, (Pooling.MAX, Pooling.CLS)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (Pooling.CLS, Pooling.MEAN)),
        ({}, ()),
    ],
)
def test_both_dialects_of_pooling_are_read(config, pooling):
    assert read_pooling(config) == pooling


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode": "attention"},
        {"pooling_mode": ["cls", "attention"]},
        {"pooling_mode": [["cls"]]},
        {"pooling_mode": {"cls": True}},
    ],
)
def test_pooling_that_is_not_supported_is_refused(config):
    with pytest.raises(StartupError, match=r"is not supported; choose one with `--pooling`"):
        read_pooling(config)


def test_bert_without_pooling_takes_cls_and_says_so(tmp_path, caplog):
    assert read(without_pooling(tmp_path)).pooling == (Pooling.CLS,)
    assert "`cls` is used; sentence-transformers would use `mean`" in caplog.text


def test_other_model_without_pooling_asks_for_it(tmp_path):
    folder = without_pooling(tmp_path, model_type="mpnet")
    assert refusal(folder) == "The model has no pooling configuration; choose one with `--pooling`"
    assert read(folder, pooling="mean").pooling == (Pooling.MEAN,)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({}, Pooling.MEAN),
        ({"pooling": "avg"}, Pooling.MEAN),
        ({"pooling": "cls"}, Pooling.CLS),
        ({"pooling": "last"}, Pooling.LAST_TOKEN),
    ],
)
def test_bidirectional_llama_is_pooled_as_its_config_says(tmp_path, config, pooling):
    folder = without_pooling(tmp_path, model_type="llama_bidirec", architectures=["LlamaBidirectionalModel"], **config)
    assert read(folder).pooling == (pooling,)


def test_pooling_of_bidirectional_llama_that_is_not_known_is_refused(tmp_path):
    folder = without_pooling(tmp_path, model_type="llama_bidirec", pooling="weighted_avg")
    assert refusal(folder) == "`config.json`: `pooling` 'weighted_avg' is not supported; supported are: avg, cls, last"


def test_pooling_option_wins(tmp_path):
    assert read(folders.embedder(tmp_path), pooling="last-token").pooling == (Pooling.LAST_TOKEN,)


def test_pooling_is_read_from_where_modules_say(tmp_path):
    modules = [{"path": "here", "type": OLD + "Pooling"}]
    folder = folders.embedder(tmp_path, {"modules.json": modules, "here/config.json": {"pooling_mode": "cls"}})
    assert read(folder).pooling == (Pooling.CLS,)


def test_sparse_pooling_is_recognized(tmp_path):
    assert read(folders.splade(tmp_path)).pooling == (Pooling.SPLADE,)


def test_sparse_pooling_needs_a_language_model_head(tmp_path):
    text = refusal(folders.embedder(tmp_path), pooling="splade")
    assert text == "`splade` pooling needs a masked-language-model head, but `architectures` is ['BertModel']"


# --- modules


@pytest.mark.parametrize("modules", [OLD_MODULES, NEW_MODULES], ids=["old", "new"])
def test_modules_of_both_dialects_are_kept_in_order(tmp_path, modules):
    dense = {"in_features": 8, "out_features": 4, "bias": True}
    model = read(folders.embedder(tmp_path, {"modules.json": modules, "2_Dense/config.json": dense}))
    assert [(module.type, module.folder.name) for module in model.modules] == [
        ("Dense", "2_Dense"),
        ("LayerNorm", "3_LayerNorm"),
    ]
    assert model.modules[0].config == dense


def test_unknown_module_is_refused_by_its_name(tmp_path):
    modules = [*OLD_MODULES, {"path": "5_CNN", "type": OLD + "CNN"}]
    text = refusal(folders.embedder(tmp_path, {"modules.json": modules}))
    assert text == "`modules.json` lists `sentence_transformers.models.CNN`, a module that is not supported"


def test_module_without_a_path_is_refused(tmp_path):
    text = refusal(folders.embedder(tmp_path, {"modules.json": [{"type": OLD + "Dense"}]}))
    assert text == "`modules.json`: `sentence_transformers.models.Dense` has no `path`"


def test_classifier_has_no_modules(tmp_path):
    folder = folders.reranker(tmp_path)
    folders.write_json(folder / "modules.json", OLD_MODULES)
    assert read(folder).modules == ()


# --- kind and labels


@pytest.mark.parametrize("architectures", [{}, {"architectures": None}, {"architectures": []}])
def test_model_without_architectures_embeds(tmp_path, architectures):
    folder = folders.embedder(tmp_path)
    config = {key: value for key, value in folders.CONFIG.items() if key != "architectures"}
    folders.write_json(folder / "config.json", {**config, **architectures})
    assert read(folder).kind is ModelType.EMBEDDING


@pytest.mark.parametrize("head", ["BertForTokenClassification", "BertForQuestionAnswering", "BertForMaskedLM"])
def test_other_heads_serve_as_encoders(tmp_path, head):
    model = read(folders.embedder(tmp_path, architectures=[head], id2label={"0": "O", "1": "B"}))
    assert (model.kind, model.pooling, model.labels) == (ModelType.EMBEDDING, (Pooling.MEAN,), ())


def test_one_label_makes_a_reranker(tmp_path):
    model = read(folders.reranker(tmp_path))
    assert (model.kind, model.pooling, model.labels) == (ModelType.RERANKER, (), ("relevance",))


def test_reranker_saved_with_two_labels_is_a_classifier(tmp_path):
    assert read(folders.classifier(tmp_path, "no", "yes")).kind is ModelType.CLASSIFIER


def test_labels_are_ordered_by_number():
    assert read_labels({"id2label": {"2": "c", "0": "a", "1": "b"}}) == ("a", "b", "c")
    ten = {str(i): f"label{i}" for i in (9, 10, *range(9))}
    assert read_labels({"id2label": ten}) == tuple(f"label{i}" for i in range(11))


def test_gap_in_the_labels_is_filled():
    assert read_labels({"id2label": {"0": "a", "2": "c"}}) == ("a", "LABEL_1", "c")


@pytest.mark.parametrize(
    ("config", "number"), [({}, 2), ({"num_labels": 3}, 3), ({"id2label": None, "num_labels": 1}, 1)]
)
def test_labels_without_names_are_numbered(config, number):
    assert read_labels(config) == tuple(f"LABEL_{i}" for i in range(number))


@pytest.mark.parametrize(
    "config",
    [
        {"id2label": {"zero": "a"}},
        {"id2label": {"-1": "a"}},
        {"id2label": {"99999999999999999999": "a"}},
        {"id2label": ["a"]},
        {"num_labels": "3"},
        {"num_labels": -3},
        {"num_labels": 10**12},
    ],
)
def test_labels_that_cannot_be_are_refused(config):
    with pytest.raises(StartupError, match=r"`config.json`"):
        read_labels(config)


def test_problem_type_says_multi_label(tmp_path):
    folder = folders.classifier(tmp_path, "a", "b", problem_type="multi_label_classification")
    assert read(folder).multi_label


def test_pooling_option_has_no_effect_on_a_classifier(tmp_path, caplog):
    assert read(folders.reranker(tmp_path), pooling="mean").pooling == ()
    assert "`--pooling` has no effect" in caplog.text


# --- lengths


@pytest.mark.parametrize(
    ("model_type", "pad", "offset"),
    [
        ("bert", 0, 0),
        ("roberta", 1, 2),
        ("xlm-roberta", 1, 2),
        ("camembert", 1, 2),
        ("roberta", None, 1),
        ("mpnet", 1, 2),
    ],
)
def test_positions_start_after_the_padding_row(model_type, pad, offset):
    assert position_offset({"model_type": model_type, "pad_token_id": pad}) == offset


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({"sentence_bert_config.json": {"max_seq_length": 20}}, 20),
        ({"sentence_bert_config.json": {"max_seq_length": 10_000}}, 40),
        (
            {"sentence_bert_config.json": {"max_seq_length": None}, "tokenizer_config.json": {"model_max_length": 30}},
            30,
        ),
        (
            {"sentence_bert_config.json": {"do_lower_case": False}, "tokenizer_config.json": {"model_max_length": 30}},
            30,
        ),
        ({"sentence_roberta_config.json": {"max_seq_length": 20}}, 20),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 40),
        ({"tokenizer_config.json": {"model_max_length": 10**30}}, 40),
        ({"tokenizer_config.json": {"model_max_length": 30}}, 30),
        ({}, 40),
    ],
)
def test_longest_input_is_the_strictest_limit(tmp_path, files, length):
    assert read(folders.embedder(tmp_path, files)).max_input_length == length


def test_positions_before_the_first_are_no_room(tmp_path):
    folder = folders.embedder(tmp_path, model_type="roberta", pad_token_id=1, max_position_embeddings=42)
    assert read(folder).max_input_length == 40


@pytest.mark.parametrize("key", ["max_trained_positions", "n_positions"])
def test_positions_have_several_names(tmp_path, key):
    folder = folders.embedder(tmp_path, max_position_embeddings=None, **{key: 24})
    assert read(folder).max_input_length == 24


def test_model_that_names_no_limit_is_refused(tmp_path):
    assert "how long an input may be" in refusal(folders.embedder(tmp_path, max_position_embeddings=None))


def test_model_without_a_position_is_refused(tmp_path):
    folder = folders.embedder(tmp_path, model_type="roberta", pad_token_id=1, max_position_embeddings=2)
    assert refusal(folder) == "`config.json` leaves no position for a token"


def test_longest_input_is_lowered_to_the_batch(tmp_path, caplog):
    assert read(folders.embedder(tmp_path), max_batch_tokens=16).max_input_length == 16
    assert "the longest input is lowered from 40 to `--max-batch-tokens` 16" in caplog.text


def test_batch_too_small_for_the_longest_input_is_refused_on_request(tmp_path):
    text = refusal(folders.embedder(tmp_path), max_batch_tokens=16, auto_truncate=False)
    assert "`--max-batch-tokens` (16) must not be less than the model's longest input (40)" in text


# --- prompts


def test_default_prompt_of_the_checkpoint_is_honoured(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert read(folders.embedder(tmp_path, SAVED_PROMPTS)).default_prompt == "query: "
    assert "default prompt: `query`" in caplog.text


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({"default_prompt_name": "passage"}, "passage: "),
        ({"default_prompt": "mine: "}, "mine: "),
        ({"default_prompt": ""}, ""),
    ],
)
def test_default_prompt_option_wins(tmp_path, options, prompt):
    assert read(folders.embedder(tmp_path, SAVED_PROMPTS), **options).default_prompt == prompt


def test_unknown_default_prompt_is_refused_with_the_names_there_are(tmp_path):
    text = refusal(folders.embedder(tmp_path, SAVED_PROMPTS), default_prompt_name="nope")
    assert text == "default prompt name `nope` is not among the model's prompts: ['passage', 'query']"


@pytest.mark.parametrize("options", [{"default_prompt": "query: "}, {"default_prompt_name": "query"}])
def test_default_prompt_has_no_effect_on_a_reranker(tmp_path, caplog, options):
    assert read(folders.reranker(tmp_path), **options).default_prompt is None
    assert "a default prompt has no effect on a reranker" in caplog.text


@pytest.mark.parametrize(("saved", "expected"), [({}, True), ({"include_prompt": False}, False)])
def test_prompt_may_be_left_out_of_pooling(tmp_path, saved, expected):
    folder = folders.embedder(tmp_path, {"1_Pooling/config.json": {**folders.MEAN, **saved}})
    assert read(folder).include_prompt is expected


def test_lower_casing_is_read(tmp_path):
    files = {"sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True}}
    assert read(folders.embedder(tmp_path, files)).lower_case


# --- nonsense

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
