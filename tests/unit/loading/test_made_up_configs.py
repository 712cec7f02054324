"""Configs that somebody has made up: one clean error names what is wrong. Most were found by `make fuzz`."""

import pytest

from tests import folders
from tests.checkpoints import bert_t, make_tokenizer
from tests.language_models import make_reranker
from tests.models.formats import jina_v3_adapted
from tests.unit.loading.starts import refusal, refusal_of_the_whole, rewrite


@pytest.mark.parametrize("path", ["/etc", "../other", "1_Dense/../../other", "x" * 10_000, "北" * 100])
def test_module_outside_of_the_directory_is_not_read(tmp_path, path):
    modules = [{"type": "sentence_transformers.models.Dense", "path": path}]
    text = refusal(folders.embedder(tmp_path, {"modules.json": modules}))
    assert text == f"`modules.json` names `{path:.100}`, which is not in the checkpoint's directory"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_norm_eps": "small"}, "`config.json`: `layer_norm_eps` must be a number, not 'small'"),
        ({"layer_norm_eps": True}, "`config.json`: `layer_norm_eps` must be a number, not True"),
        ({"hidden_act": ["gelu"]}, "`config.json`: `hidden_act` must be a string, not ['gelu']"),
        ({"head_dim": "x"}, "`config.json`: `head_dim` must be a whole number, not 'x'"),
        ({"rope_scaling": "yarn"}, "`config.json`: `rope_scaling` must be an object, not 'yarn'"),
        ({"layer_types": {}}, "`config.json`: `layer_types` must be a list, not {}"),
        ({"vocab_size": [267]}, "`config.json`: `vocab_size` must be a whole number, not [267]"),
        ({"num_attention_heads": 5}, "the model that `config.json` describes does not run: "),
        ({"vocab_size": 2**45}, f"no memory for a tensor of shape [{2**45}, 32], which the config describes"),
        ({"hidden_size": 2**31}, f"`hidden_size` in `config.json` must be at most {2**20}. Given: {2**31}"),
        (
            {"num_attention_heads": 1e30},
            f"`num_attention_heads` in `config.json` must be at most {2**20}. Given: 1e+30",
        ),
        ({"vocab_size": 2**70}, "config.json does not describe a model of type bert: "),
    ],
)
def test_config_with_impossible_numbers_is_named_on_one_line(tmp_path, changes, text):
    folder = bert_t(tmp_path)
    rewrite(folder / "config.json", **changes)
    message = refusal_of_the_whole(folder)
    assert message.startswith(text)
    assert "\n" not in message


@pytest.mark.parametrize("out_features", [-1, 2**70, "8", [8]])
def test_dense_module_with_impossible_numbers_is_named(tmp_path, out_features):
    folder = bert_t(tmp_path)
    modules = [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    folders.write_json(folder / "modules.json", modules)
    folders.write_json(folder / "2_Dense" / "config.json", {"in_features": 32, "out_features": out_features})
    message = refusal_of_the_whole(folder)
    assert message.startswith(f"`config.json` in {folder / '2_Dense'} does not describe a module Dense: ")
    assert "\n" not in message


@pytest.mark.parametrize("tokens", [{"true_token_id": -1}, {"false_token_id": -(2**31)}, {"false_token_id": 2**70}])
def test_tokens_that_the_vocabulary_does_not_have_are_named(tmp_path, tokens):
    folder = make_reranker(tmp_path, "Qwen3ForCausalLM")
    rewrite(folder / "1_LogitScore" / "config.json", **tokens)
    assert " score pairs, but `lm_head.weight` has 267 rows" in refusal_of_the_whole(folder)


@pytest.mark.parametrize("scores", ["1", 0, -1, 2**60, [1]])
def test_scores_that_cannot_be_counted_are_refused(tmp_path, scores):
    modules = [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    dense = {"in_features": 32, "out_features": scores, "module_output_name": "scores"}
    text = refusal(folders.embedder(tmp_path, {"modules.json": modules, "2_Dense/config.json": dense}))
    assert text in (
        f"`2_Dense/config.json`: `out_features` must be a whole number, not {scores!r}",
        f"`config.json`: {scores} labels; there may be 1 to 1000000",
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora_rank": 0}, "`config.json`: `lora_alpha` 1 and `lora_rank` 0 are no scale"),
        ({"lora_alpha": 10**400}, "`config.json`: `lora_alpha` 1000"),
        ({"lora_alpha": "1"}, "`config.json`: `lora_alpha` must be a number, not '1'"),
        ({"lora_adaptations": 5}, "`config.json`: `lora_adaptations` must be a list, not 5"),
        ({"lora_adaptations": [["x"]]}, "`config.json`: `lora_adaptations` must be a list of strings, not [['x']]"),
        ({"lora_adaptations": ["a", "b", "c", "separation"]}, "the adaptation `roberta."),
    ],
)
def test_adaptations_that_the_config_describes_wrongly_are_named(tmp_path, changes, text):
    jina_v3_adapted(tmp_path)
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    rewrite(tmp_path / "config.json", **changes)
    assert refusal_of_the_whole(tmp_path, pooling="mean", lora_task="separation").startswith(text)
