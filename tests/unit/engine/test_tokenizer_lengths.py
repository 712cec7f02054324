"""Texts longer than the model takes, up to megabytes: refused, or cut at one end in no time."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tei_grpc.engine.tokenizer import longest_first, truncate
from tei_grpc.errors import ValidationError
from tei_grpc.types import Input
from tests import folders
from tests.checkpoints import make_tokenizer
from tests.unit.engine.texts import LEFT, RIGHT, ids, short, tokenizer_of, tokens


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
