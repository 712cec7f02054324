"""Tokenizers that somebody has made up: one clean error names what is wrong. Most were found by `make fuzz`."""

import json

import pytest
import tokenizers
import torch

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import StartupError, TokenizationError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Input
from tests import folders
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeDevice
from tests.unit.loading.starts import refusal, rewrite

PANICS_WHEN_READ = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def panicking(texts: str) -> tokenizers.Tokenizer:
    """A tokenizer whose library panics at single texts, or at pairs: the template names a token that is not listed."""
    described = json.loads(make_tokenizer().to_str())
    missing = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[MASK]", "type_id": 0}}]
    described["post_processor"][texts] = missing + [{"Sequence": {"id": "B", "type_id": 1}}] * (texts == "pair")
    return tokenizers.Tokenizer.from_str(json.dumps(described))


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
