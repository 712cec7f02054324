"""What a prompt and the checkpoint's lower-casing do to a text's tokens."""

import json
from pathlib import Path

import pytest

from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import ValidationError
from tei_grpc.types import Input
from tests import folders
from tests.unit.engine.texts import LEFT, ids, offsets, tokenizer_of, tokens

PROMPTS = {"prompts": {"query": "query: ", "查询": "北京 "}}


def prompted(folder: Path, **pooling: object) -> Tokenizer:
    files = {"config_sentence_transformers.json": PROMPTS, "1_Pooling/config.json": {**folders.MEAN, **pooling}}
    return tokenizer_of(folders.embedder(folder, files))


async def test_prompt_is_part_of_the_tokens(tmp_path):
    tokenizer = prompted(tmp_path)
    assert await ids(tokenizer, "hello", prompt_name="query") == [2, 92, 45, 82, 3]


async def test_offsets_count_the_prompt(tmp_path):
    tokenizer = prompted(tmp_path)
    assert await offsets(tokenizer, "hello", "query") == [(0, 5), (5, 6), (7, 12)]
    assert await offsets(tokenizer, "hello", "查询") == [(0, 3), (3, 6), (7, 12)]


async def test_unknown_prompt_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="Available prompts"):
        await prompted(tmp_path).tokenize("hello", list, add_special_tokens=True, prompt_name="nope")


async def test_prompt_takes_part_in_pooling_by_default(tmp_path):
    encoding = await prompted(tmp_path).encode(Input("hello", prompt_name="query"))
    assert encoding.prompt_tokens == 0


async def test_prompt_tokens_are_counted_as_sentence_transformers_does(tmp_path):
    """Its rule: tokens of the prompt alone, without a closing special token: [CLS] query : here."""
    encoding = await prompted(tmp_path, include_prompt=False).encode(Input("hello", prompt_name="query"))
    assert encoding.prompt_tokens == 3


async def test_prompt_that_truncation_cut_off_is_not_counted(tmp_path):
    tokenizer = prompted(tmp_path, include_prompt=False)
    input = Input("a " * 37, prompt_name="query", truncate=True, truncation_direction=LEFT)
    encoding = await tokenizer.encode(input)
    assert encoding.input_ids[:3].tolist() == [2, 45, 5]
    assert encoding.prompt_tokens == 2


async def test_lower_casing_asked_for_by_the_checkpoint_reaches_text_and_prompt(tmp_path):
    files = {
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"query": "QUERY: "}},
    }
    folder = folders.embedder(tmp_path, files)
    cased = json.loads((folder / "tokenizer.json").read_text())
    cased["normalizer"]["lowercase"] = False
    folders.write_json(folder / "tokenizer.json", cased)
    assert await ids(tokenizer_of(folder), "HELLO", prompt_name="query") == [2, 92, 45, 82, 3]


async def test_token_text_keeps_its_capitals_in_a_lower_casing_checkpoint(tmp_path):
    files = {"sentence_bert_config.json": {"do_lower_case": True}}
    found = await tokens(tokenizer_of(folders.embedder(tmp_path, files)), "HELLO")
    assert found[1].text == "HELLO"
