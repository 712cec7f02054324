"""What a checkpoint of sentence-transformers says, in both dialects: pooling, modules, prompts."""

import logging
from pathlib import Path

import pytest

from tei_grpc.errors import StartupError
from tei_grpc.loading.sentence_transformers import read_pooling
from tei_grpc.types import Pooling
from tests import folders
from tests.unit.loading.descriptions import read, refusal

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


def without_pooling(folder: Path, **config: object) -> Path:
    folders.embedder(folder, **config)
    (folder / "1_Pooling" / "config.json").unlink()
    return folder


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


def test_pooling_option_has_no_effect_on_a_classifier(tmp_path, caplog):
    assert read(folders.reranker(tmp_path), pooling="mean").pooling == ()
    assert "`--pooling` has no effect" in caplog.text


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
