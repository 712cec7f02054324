"""Checkpoints whose files somebody has made up: one clean error names what is wrong. Most were found by `make fuzz`."""

import asyncio
import json
from pathlib import Path

import pytest
import tokenizers

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


def refusal_of_the_whole(folder: Path) -> str:
    """What the user is told, at a start with weights."""

    async def start() -> None:
        async with Engine(EngineConfig(model_id=str(folder))):
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
        ({"layer_norm_eps": "small"}, "the model that `config.json` describes does not run: "),
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
