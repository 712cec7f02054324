"""Inputs that are tokenized together are what each is alone."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from tei_grpc.config import EngineConfig
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import TokenizationError, ValidationError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Encoding, Input, TruncationDirection
from tests import folders, language_models
from tests.checkpoints import make_tokenizer

TEXTS = [
    "hello world",
    " ",
    "é\u0301 北京",
    "yes no  yes",
    "[SEP] <mask> </s>",
    "a " * 15,
    "b" * 33,
    "\n x\x00y ",
    "hello",
]
LONG = "a b c d e f g " * 5  # 40 are allowed
LIST = [
    *map(Input, TEXTS),
    *(Input(LONG, truncate=True, truncation_direction=direction) for direction in TruncationDirection),
    Input("hello", "world"),
    Input("hello", prompt_name="query"),
    Input("hello " * 1000, truncate=True),
]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = language_models.make_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, trim_offsets=True)
    tokenizer.post_processor = processors.RobertaProcessing(("<eos>", 1), ("<bos>", 0))
    return tokenizer


def word_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.ByteLevel()
    return tokenizer


def funnel() -> tokenizers.Tokenizer:
    tokenizer = make_tokenizer()
    single, specials = "[CLS]:2 $A:0 [SEP]:0", [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
    return tokenizer


KINDS = {"bert": make_tokenizer, "byte level": byte_level, "word level": word_level, "funnel": funnel}


def tokenizer_over(folder, made: tokenizers.Tokenizer | None = None, **pooling: object) -> Tokenizer:
    prompts = {"prompts": {"query": "query: "}}
    files = {"config_sentence_transformers.json": prompts, "1_Pooling/config.json": {**folders.MEAN, **pooling}}
    folder = folders.embedder(folder, files)
    if made is not None:
        made.save(str(folder / "tokenizer.json"))
    config = EngineConfig(model_id=str(folder))
    return Tokenizer(read_model_config(folder, config), config)


def facts(encoding: Encoding) -> tuple[object, ...]:
    types = encoding.token_type_ids
    assert encoding.input_ids.dtype == np.int32
    return (
        encoding.input_ids.tolist(),
        types if types is None else types.tolist(),
        encoding.prompt_tokens,
        encoding.is_cut,
    )


async def check(tokenizer: Tokenizer, inputs: list[Input]) -> None:
    one_by_one = [facts(tokenizer._encode(input)) for input in inputs]
    for _ in ("first", "again"):
        assert [facts(each) for each in await tokenizer.encode_all(inputs)] == one_by_one
        assert [facts(await tokenizer.encode(input)) for input in inputs] == one_by_one


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_inputs_together_are_what_each_is_alone(tmp_path, kind, include_prompt):
    tokenizer = tokenizer_over(tmp_path, KINDS[kind](), include_prompt=include_prompt)
    inputs = [input for input in LIST if kind != "word level" or input.text.strip()]  # where a space is no token at all
    await check(tokenizer, inputs)


async def test_first_input_that_has_an_error_decides(tmp_path):
    tokenizer = tokenizer_over(tmp_path)
    with pytest.raises(ValidationError, match="must have less than 40 tokens. Given: 42"):
        await tokenizer.encode_all([Input("a"), Input("a " * 40), Input("\ud800")])
    with pytest.raises(TokenizationError):
        await tokenizer.encode_all([Input("a"), Input("\ud800"), Input("a " * 40)])
