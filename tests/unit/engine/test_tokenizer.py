"""Texts to encodings and back: known ids, offsets, truncation, prompts."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tei_grpc.config import EngineConfig
from tei_grpc.engine.tokenizer import Tokenizer, load, longest_first, truncate
from tei_grpc.errors import StartupError, TokenizationError, ValidationError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Input, SimpleToken, TruncationDirection
from tests import folders
from tests.checkpoints import make_tokenizer

RIGHT, LEFT = TruncationDirection.RIGHT, TruncationDirection.LEFT
CLS, SEP = 2, 3
PROMPTS = {"prompts": {"query": "query: ", "查询": "北京 "}}
FAMILY = "👨‍👩‍👧"


def tokenizer_of(folder: Path, **options) -> Tokenizer:
    config = EngineConfig(model_id=str(folder), **options)
    return Tokenizer(read_model_config(folder, config), config)


@pytest.fixture
def tokenizer(tmp_path):
    tokenizer = tokenizer_of(folders.embedder(tmp_path))
    yield tokenizer
    tokenizer.close()


def short(folder: Path, positions: int) -> Tokenizer:
    return tokenizer_of(folders.embedder(folder, max_position_embeddings=positions))


def prompted(folder: Path, **pooling: object) -> Tokenizer:
    files = {"config_sentence_transformers.json": PROMPTS, "1_Pooling/config.json": {**folders.MEAN, **pooling}}
    return tokenizer_of(folders.embedder(folder, files))


async def ids(tokenizer: Tokenizer, text: str, pair: str | None = None, **options) -> list[int]:
    return (await tokenizer.encode(Input(text, pair, **options))).input_ids.tolist()


async def tokens(tokenizer: Tokenizer, text: str, prompt_name: str | None = None) -> list[SimpleToken]:
    return await tokenizer.tokenize(text, list, add_special_tokens=True, prompt_name=prompt_name)


async def offsets(tokenizer: Tokenizer, text: str, prompt_name: str | None = None) -> list[tuple[int, int]]:
    return [(token.start, token.stop) for token in await tokens(tokenizer, text, prompt_name) if not token.special]


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


@pytest.mark.parametrize(("direction", "expected"), [(RIGHT, [2, 5, 6, 7, 3]), (LEFT, [2, 9, 10, 11, 3])])
async def test_truncation_keeps_special_tokens_and_one_end(tmp_path, direction, expected):
    tokenizer = short(tmp_path, 5)
    assert await ids(tokenizer, "a b c d e f g", truncate=True, truncation_direction=direction) == expected


@pytest.mark.parametrize(
    ("text", "pair", "is_cut"),
    [("a b c", None, False), ("a b c d", None, True), ("a", "b", False), ("a", "b c", True), ("a" * 9999, None, True)],
)
async def test_encoding_says_whether_it_is_all_of_the_input(tmp_path, text, pair, is_cut):
    encoding = await short(tmp_path, 5).encode(Input(text, pair, truncate=True))
    assert encoding.is_cut == is_cut


async def test_too_long_text_is_refused_without_truncation(tmp_path):
    with pytest.raises(ValidationError, match="must have less than 5 tokens. Given: 9"):
        await short(tmp_path, 5).encode(Input("a b c d e f g"))


async def test_limit_itself_is_allowed_and_one_more_is_not(tokenizer):
    assert len(await ids(tokenizer, "a " * 38)) == 40
    with pytest.raises(ValidationError, match="Given: 41"):
        await tokenizer.encode(Input("a " * 39))
    assert len(await ids(tokenizer, "a " * 39, truncate=True)) == 40


@pytest.mark.parametrize("pair", [None, "b"])
async def test_model_too_short_for_its_special_tokens_refuses_every_text(tmp_path, pair):
    with pytest.raises(ValidationError, match="must have less than 1 tokens"):
        await short(tmp_path, 1).encode(Input("a", pair, truncate=True))


async def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path):
    folder = folders.embedder(tmp_path)
    padded = make_tokenizer()
    padded.enable_padding(length=16)
    padded.enable_truncation(6)
    padded.save(str(folder / "tokenizer.json"))
    tokenizer = tokenizer_of(folder)
    assert await ids(tokenizer, "a b c d e f g h") == [2, *range(5, 13), 3]
    assert len(await tokens(tokenizer, "a b c d e f g h")) == 10


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


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_both_texts_fill_the_room_without_a_token_too_many(first, second, room):
    kept = longest_first(first, second, room)
    assert sum(kept) == min(first + second, room)
    assert kept[0] <= first
    assert kept[1] <= second


@given(st.integers(0, 12), st.integers(0, 12), st.integers(3, 20), st.sampled_from([RIGHT, LEFT]))
def test_pairs_are_truncated_as_the_library_does(first, second, limit, direction):
    texts = "a" * first, "b" * second
    spaced = tuple(" ".join(text) for text in texts)
    library = make_tokenizer()
    library.enable_truncation(limit, direction=direction.value)
    ours = make_tokenizer()
    encodings = [ours.encode(text, add_special_tokens=False) for text in spaced]
    truncate(ours, *encodings, limit, direction)
    assert ours.post_process(*encodings).ids == library.encode(*spaced).ids


@given(st.integers(0, 12), st.integers(2, 20), st.sampled_from([RIGHT, LEFT]))
def test_single_texts_are_truncated_as_the_library_does(length, limit, direction):
    text = " ".join("abcdefghijkl"[:length])
    library = make_tokenizer()
    library.enable_truncation(limit, direction=direction.value)
    ours = make_tokenizer()
    encoding = ours.encode(text, add_special_tokens=False)
    truncate(ours, encoding, None, limit, direction)
    assert ours.post_process(encoding).ids == library.encode(text).ids


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


@pytest.mark.parametrize("text", ["a" * 3_000_000, "  " * 1_500_000, "😀" * 750_000, "a " * 1_500_000])
@pytest.mark.parametrize("direction", [RIGHT, LEFT])
async def test_megabytes_are_truncated_in_no_time(tmp_path, text, direction):
    tokenizer = short(tmp_path, 8)
    started = time.perf_counter()
    assert len(await ids(tokenizer, text, truncate=True, truncation_direction=direction)) <= 8
    assert time.perf_counter() - started < 1


async def test_left_truncation_of_megabytes_keeps_the_tail(tmp_path):
    found = await ids(short(tmp_path, 5), "a " * 100_000 + "x y z", truncate=True, truncation_direction=LEFT)
    assert found == [2, 28, 29, 30, 3]


async def test_long_pair_keeps_both_sides(tmp_path):
    encoding = await short(tmp_path, 8).encode(Input("a " * 5000, "b " * 5000, truncate=True))
    assert encoding.input_ids.tolist() == [2, 5, 5, 3, 6, 6, 6, 3]


async def test_long_text_does_not_block_the_event_loop(tokenizer):
    work = asyncio.ensure_future(tokenizer.encode(Input("a " * 4000, truncate=True)))
    await asyncio.sleep(0)
    assert not work.done()
    assert len((await work).input_ids) == 40


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
