"""Texts to encodings and back: known ids, offsets, special tokens."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tei_grpc.engine.tokenizer import Tokenizer, load
from tei_grpc.errors import StartupError, TokenizationError, ValidationError
from tei_grpc.types import Input, SimpleToken
from tests import folders
from tests.checkpoints import make_tokenizer
from tests.unit.engine.texts import LEFT, RIGHT, ids, offsets, tokenizer_of, tokens

CLS, SEP = 2, 3
FAMILY = "👨‍👩‍👧"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Café 😀 北京!", [2, 87, 86, 84, 85, 43, 3]),
        (FAMILY + " hi", [2, 1, 12, 54, 3]),
        ("שלום hello", [2, 91, 82, 3]),
        (" ", [2, 3]),
        ("\t\n  ", [2, 3]),
        ("a\x00b", [2, 5, 47, 3]),
        ("hello [SEP] world [CLS]", [2, 82, 3, 83, 2, 3]),
        ("[sep] hello", [2, 1, 23, 50, 61, 1, 82, 3]),
    ],
)
async def test_text_becomes_known_ids(tokenizer, text, expected):
    assert await ids(tokenizer, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Café 😀 北京!", [(0, 5), (6, 10), (11, 14), (14, 17), (17, 18)]),
        (FAMILY + " hi", [(0, 18), (19, 20), (20, 21)]),
        ("שלום hello", [(0, 8), (9, 14)]),
        ("\u202eabc", [(3, 4), (4, 5), (5, 6)]),
        ("a\x00b", [(0, 1), (2, 3)]),
        ("hello [SEP] world [CLS]", [(0, 5), (6, 11), (12, 17), (18, 23)]),
    ],
)
async def test_offsets_are_utf8_bytes(tokenizer, text, expected):
    assert await offsets(tokenizer, text) == expected


@given(text=st.text(max_size=40))
def test_token_text_is_the_byte_slice_of_the_input(text, tmp_path_factory):
    tokenizer = shared_tokenizer(tmp_path_factory)
    for token in asyncio.run(tokenizer.tokenize(text, list, add_special_tokens=True, prompt_name=None)):
        if not token.special:
            assert token.text.encode() == text.encode()[token.start : token.stop]


def shared_tokenizer(tmp_path_factory, made: dict[str, Tokenizer] = {}) -> Tokenizer:  # noqa: B006 - made once
    if not made:
        made["it"] = tokenizer_of(folders.embedder(tmp_path_factory.mktemp("shared")))
    return made["it"]


async def test_token_text_keeps_accent_and_capital(tokenizer):
    first, *inner, last = await tokens(tokenizer, "Café 😀 北京!")
    assert [token.text for token in inner] == ["Café", "😀", "北", "京", "!"]
    assert first == SimpleToken(CLS, "[CLS]", True, None, None)
    assert last == SimpleToken(SEP, "[SEP]", True, None, None)


async def test_joined_emoji_is_not_cut(tokenizer):
    assert (await tokens(tokenizer, FAMILY + " hi"))[1].text == FAMILY


async def test_special_token_that_the_caller_typed_is_not_special(tokenizer):
    found = await tokens(tokenizer, "hello [SEP] world [CLS]")
    assert [token.special for token in found] == [True, False, False, False, False, True]


async def test_special_tokens_can_be_read_as_plain_text(tmp_path):
    tokenizer = tokenizer_of(folders.embedder(tmp_path), split_special_tokens=True)
    assert await ids(tokenizer, "hello [SEP]") == [2, 82, 1, 23, 50, 61, 1, 3]


async def test_special_tokens_can_be_left_out(tokenizer):
    found = await tokenizer.tokenize("hello", list, add_special_tokens=False, prompt_name=None)
    assert found == [SimpleToken(82, "hello", False, 0, 5)]


async def test_text_of_no_tokens_is_refused(tmp_path):
    folder = folders.embedder(tmp_path)
    bare = tokenizers.Tokenizer(models.WordLevel({"hello": 0}, unk_token="hello"))
    bare.normalizer = normalizers.Strip()
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    bare.save(str(folder / "tokenizer.json"))
    tokenizer = tokenizer_of(folder)
    with pytest.raises(ValidationError, match="`inputs` must have at least 1 token. Given: 0"):
        await tokenizer.encode(Input("   "))
    assert await ids(tokenizer, "hello") == [0]


async def test_pair_has_two_segments(tokenizer):
    encoding = await tokenizer.encode(Input("hello", "world"))
    assert encoding.input_ids.tolist() == [2, 82, 3, 83, 3]
    assert encoding.token_type_ids.tolist() == [0, 0, 0, 1, 1]


async def test_single_text_has_no_type_ids(tokenizer):
    assert (await tokenizer.encode(Input("hello"))).token_type_ids is None


async def test_single_text_keeps_the_types_that_its_template_gives(tmp_path):
    folder = folders.embedder(tmp_path)
    funnel = make_tokenizer()
    tokens = [("[CLS]", 2), ("[SEP]", 3)]
    funnel.post_processor = processors.TemplateProcessing(single="[CLS]:2 $A:0 [SEP]:0", special_tokens=tokens)
    funnel.save(str(folder / "tokenizer.json"))
    encoding = await tokenizer_of(folder).encode(Input("hello world"))
    assert encoding.token_type_ids.tolist() == [2, 0, 0, 0]


async def test_pair_may_have_an_empty_side(tokenizer):
    assert await ids(tokenizer, "", "world") == [2, 3, 83, 3]


async def test_text_that_is_no_unicode_is_an_error_of_the_tokenizer(tokenizer):
    with pytest.raises(TokenizationError, match="could not be tokenized"):
        await tokenizer.encode(Input("\ud800"))


def test_one_tokenizer_serves_many_threads(tokenizer):
    def work(number: int) -> bool:
        limit_first = number % 2 == 0
        input = Input("a b c d e f " * 8, truncate=True, truncation_direction=RIGHT if limit_first else LEFT)
        encoding = tokenizer._encode(input)
        return encoding.input_ids.tolist()[1] == (5 if limit_first else 9)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


async def test_ids_become_text_again(tokenizer):
    assert await tokenizer.decode([2, 82, 83, 3], skip_special_tokens=True) == "hello world"
    assert await tokenizer.decode([2, 82, 83, 3], skip_special_tokens=False) == "[CLS] hello world [SEP]"


async def test_word_pieces_are_joined(tmp_path):
    folder = folders.embedder(tmp_path)
    joined = make_tokenizer()
    joined.decoder = decoders.WordPiece()
    joined.save(str(folder / "tokenizer.json"))
    assert await tokenizer_of(folder).decode([12, 54], skip_special_tokens=True) == "hi"


async def test_ids_outside_the_vocabulary_are_skipped(tokenizer):
    assert await tokenizer.decode([82, 2**32 - 1], skip_special_tokens=True) == "hello"


@pytest.mark.parametrize("id", [-1, 2**32])
async def test_number_that_is_no_id_is_an_error_of_the_tokenizer(tokenizer, id):
    with pytest.raises(TokenizationError):
        await tokenizer.decode([id], skip_special_tokens=True)


def test_number_of_threads_can_be_chosen(tmp_path):
    assert tokenizer_of(folders.embedder(tmp_path), tokenization_workers=3).workers == 3


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(StartupError, match=r"`tokenizer.json` not found in"):
        load(tmp_path, {})


def test_tokenizer_of_an_unknown_format_names_the_version_of_the_library(tmp_path):
    folders.write_json(tmp_path / "tokenizer.json", {"version": "9.0", "model": {"type": "Unheard"}})
    with pytest.raises(StartupError, match=f"cannot be read by tokenizers {tokenizers.__version__}"):
        load(tmp_path, {})
