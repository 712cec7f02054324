"""Checkpoints whose files somebody has made up: one clean error names what is wrong. Most were found by `make fuzz`."""

import asyncio
import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import StartupError, TokenizationError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Input
from tests import folders
from tests.checkpoints import bert_t, make_tokenizer
from tests.fakes import FakeDevice
from tests.language_models import make_reranker
from tests.models.formats import jina_v3_adapted

PANICS_WHEN_READ = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def rewrite(file: Path, **changes: object) -> None:
    """Other values for some keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def panicking(texts: str) -> tokenizers.Tokenizer:
    """A tokenizer whose library panics at single texts, or at pairs: the template names a token that is not listed."""
    described = json.loads(make_tokenizer().to_str())
    missing = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[MASK]", "type_id": 0}}]
    described["post_processor"][texts] = missing + [{"Sequence": {"id": "B", "type_id": 1}}] * (texts == "pair")
    return tokenizers.Tokenizer.from_str(json.dumps(described))


def refusal(folder: Path) -> str:
    """What the user is told, at a start without weights."""
    config = EngineConfig(model_id=str(folder))
    with pytest.raises(StartupError) as caught:
        Tokenizer(read_model_config(folder, config), config).close()
    return caught.value.message


def refusal_of_the_whole(folder: Path, **options: object) -> str:
    """What the user is told, at a start with weights."""

    async def start() -> None:
        async with Engine(EngineConfig.model_validate({"model_id": str(folder), **options})):
            pass

    with pytest.raises(StartupError) as caught:
        asyncio.run(start())
    return caught.value.message


def test_panic_of_the_tokenizers_library_at_its_file_is_a_clean_error(tmp_path):
    folder = folders.embedder(tmp_path)
    rewrite(folder / "tokenizer.json", normalizer=PANICS_WHEN_READ)
    assert refusal(folder).startswith(f"`{folder}/tokenizer.json` cannot be read by tokenizers")


def test_tokenizer_that_panics_at_any_text_is_refused_at_start(tmp_path):
    folder = folders.embedder(tmp_path)
    panicking("single").save(str(folder / "tokenizer.json"))
    assert refusal(folder).startswith(f"the tokenizer of `{folder}` fails at any text: ")


async def test_panic_at_an_input_is_an_ordinary_error_for_its_caller(tmp_path):
    folder = folders.reranker(tmp_path)
    panicking("pair").save(str(folder / "tokenizer.json"))
    config = EngineConfig(model_id=str(folder))
    tokenizer = Tokenizer(read_model_config(folder, config), config)
    for text in ("a", "a" * 1000):  # on the event loop, and on a thread
        with pytest.raises(TokenizationError) as caught:
            await tokenizer.encode(Input(text, "b", truncate=True))
        assert caught.value.message == "tokenizer error: the input could not be tokenized"
    tokenizer.close()


async def test_panic_while_loading_is_a_clean_error(tmp_path, monkeypatch):
    folder = folders.embedder(tmp_path)
    config = EngineConfig(model_id=str(folder))
    device = FakeDevice(read_model_config(folder, config), config)

    def panic(*_: object) -> None:
        tokenizers.Tokenizer.from_str(
            json.dumps({**json.loads(make_tokenizer().to_str()), "normalizer": PANICS_WHEN_READ})
        )

    monkeypatch.setattr("tei_grpc.engine.engine.read_model_config", panic)
    with pytest.raises(StartupError, match="cannot be loaded: PanicException: "):
        await Engine(config, device).start()


@pytest.mark.parametrize("path", ["/etc", "../other", "1_Dense/../../other", "x" * 10_000, "北" * 100])
def test_module_outside_of_the_directory_is_not_read(tmp_path, path):
    modules = [{"type": "sentence_transformers.models.Dense", "path": path}]
    text = refusal(folders.embedder(tmp_path, {"modules.json": modules}))
    assert text == f"`modules.json` names `{path:.100}`, which is not in the checkpoint's directory"


def test_weights_outside_of_the_directory_are_not_read(tmp_path):
    folder = bert_t(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"embeddings.word_embeddings.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = refusal_of_the_whole(folder)
    assert text == (
        "`model.safetensors.index.json` names `../model.safetensors`, which is not in the checkpoint's directory"
    )


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


def test_header_that_claims_more_bytes_than_there_are_is_refused(tmp_path):
    folder = bert_t(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes((2**60).to_bytes(8, "little") + weights.read_bytes()[8:])
    assert refusal_of_the_whole(folder) == f"{weights} is damaged or cut short"


TOKEN = {"lstrip": True}  # an object without `content`


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("tokenizer_config.json", {"model_max_length": "512"}, "`model_max_length` must be a number, not '512'"),
        ("sentence_bert_config.json", {"max_seq_length": "9"}, "`max_seq_length` must be a number, not '9'"),
        ("sentence_roberta_config.json", {"max_seq_length": []}, "`max_seq_length` must be a number, not []"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"chat_template": ["x"]}},
            "`chat_template` must be an object, not ['x']",
        ),
    ],
)
def test_value_of_another_type_is_named_with_its_file(tmp_path, file, content, text):
    assert refusal(folders.embedder(tmp_path, {file: content})) == f"`{file}`: {text}"


@pytest.mark.parametrize("token", [3, [], TOKEN, {"content": None}])
def test_special_token_without_a_text_is_named(tmp_path, token):
    folder = folders.embedder(tmp_path, {"tokenizer_config.json": {"cls_token": token}})
    torch.save({"weight": torch.ones(1, 32)}, folder / "sparse_linear.pt")
    text = "`tokenizer_config.json`: `cls_token` must be a string, or an object with `content`, not "
    assert refusal(folder) == f"{text}{token!r}"


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        ("tokenizer_config.json", {"cls_token": TOKEN}, "cls_token"),
        ("special_tokens_map.json", {"unk_token": TOKEN}, "unk_token"),
        ("special_tokens_map.json", {"additional_special_tokens": [TOKEN]}, "additional_special_tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"4": TOKEN}}, "added_tokens_decoder"),
    ],
)
def test_token_of_a_vocabulary_without_a_text_is_named_with_its_file(tmp_path, file, content, key):
    folder = folders.embedder(tmp_path, {file: content})
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    assert refusal(folder).startswith(f"`{file}`: `{key}` must be a string, or an object with `content`, not ")


def test_ids_of_added_tokens_that_are_no_numbers_are_named(tmp_path):
    folder = folders.embedder(tmp_path, {"added_tokens.json": {"<a>": "one"}})
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    assert refusal(folder) == "`added_tokens.json`: `<a>` must be a whole number, not 'one'"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"chat_template": 5}, "`tokenizer_config.json`: `chat_template` must be a string, not 5"),
        ({"chat_template": ["x"]}, "`tokenizer_config.json`: `chat_template` must be a list of objects, not ['x']"),
        (
            {"chat_template": [{"name": "default", "template": 5}]},
            "`tokenizer_config.json`: `template` must be a string, not 5",
        ),
        ({"chat_template": "{% if %}"}, "the chat template is no Jinja template: "),
        ({"chat_template": "{% if x %}" * 200 + "{% endif %}" * 200}, "the chat template is no Jinja template: "),
        (
            {"chat_template": "x", "bos_token": TOKEN},
            "`tokenizer_config.json`: `bos_token` must be a string, or an object with `content`, not ",
        ),
    ],
)
def test_chat_template_of_another_form_is_named(tmp_path, config, text):
    folder = folders.reranker(tmp_path)
    folders.write_json(folder / "tokenizer_config.json", config)
    assert refusal(folder).startswith(text)


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


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"weight_map": ["x"]}, "`model.safetensors.index.json`: `weight_map` must be an object, not ['x']"),
        ({"weight_map": {"x": {}}}, "`{file}`: `weight_map` must map tensors to names of files"),
        ({}, "`{file}` names no weight files: it has no `weight_map`"),
        ([], "`{file}` must hold a JSON object"),
    ],
)
def test_index_of_another_form_is_named(tmp_path, index, text):
    folder = bert_t(tmp_path)
    (folder / "model.safetensors").unlink()
    folders.write_json(folder / "model.safetensors.index.json", index)
    assert refusal_of_the_whole(folder) == text.format(file=folder / "model.safetensors.index.json")


@pytest.mark.parametrize("header", [b"[1, 2]", b'"x"', b"[" * 100_000])
def test_header_that_is_no_object_is_refused_where_it_has_to_tell_the_architecture(tmp_path, header):
    folder = bert_t(tmp_path)
    rewrite(folder / "config.json", architectures=None)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert refusal_of_the_whole(folder) == f"{folder / 'model.safetensors'} is damaged or cut short"


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({0: torch.ones(1)}, "{file} holds no dictionary of tensors by name"),
        ({"weight": torch.ones(())}, "tensor `weight` has shape [], the model needs [32, 32]"),
    ],
)
def test_head_of_another_form_is_named(tmp_path, tensors, text):
    folder = bert_t(tmp_path)
    file = folder / "colbert_linear.pt"
    torch.save(tensors, file)
    assert refusal_of_the_whole(folder, colbert=True) == text.format(file=file)


def test_vocabulary_head_without_rows_is_refused(tmp_path):
    folder = make_reranker(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.ones(())}, folder / "model.safetensors")
    text = "tensor `lm_head.weight` has shape []; it must have a row for each token"
    assert refusal_of_the_whole(folder) == text
