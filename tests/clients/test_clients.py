"""Both clients against the real server; only the model is weightless: its vectors tell the token ids (w0 is 4)."""

import asyncio
import math

import grpc
import numpy as np
import pytest
from tei_client import InvalidInputError, Prediction, Rank, TeiClientError, Token
from tei_client.connection import WINDOW

from tests.fakes import SIZE
from tests.grpc.conftest import serve_fake, write_checkpoint

Code = grpc.StatusCode


def raw_vector(*ids):
    """What the fake runner answers: length, sum, then the ids over and over."""
    return [len(ids), sum(ids), *(ids[i % len(ids)] for i in range(SIZE - 2))]


async def test_one_text_gives_one_vector(served, connect):
    async with connect(served.address) as ask:
        vector = await ask("embed", "w0 w1", normalize=False)
    assert vector.dtype == np.float32
    assert vector.tolist() == raw_vector(2, 4, 5, 3)
    vector[0] = 0  # it is the caller's own


async def test_list_gives_a_row_per_text_in_order(served, connect):
    numbers = [number % 200 for number in range(2 * WINDOW + 1)]
    async with connect(served.address) as ask:
        vectors = await ask("embed", [f"w{number}" for number in numbers], normalize=False)
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, [raw_vector(2, 4 + number, 3) for number in numbers])


async def test_list_of_one_is_still_a_list(served, connect):
    async with connect(served.address) as ask:
        assert (await ask("embed", ["w0"])).shape == (1, SIZE)


async def test_empty_lists_need_no_server(connect):
    async with connect("127.0.0.1:1") as ask:
        assert (await ask("embed", [])).shape == (0, 0)
        assert [await ask(m, []) for m in ("embed_all", "embed_sparse", "predict", "tokenize", "decode")] == [[]] * 5


async def test_vectors_are_normalized_unless_told_otherwise(served, connect):
    async with connect(served.address) as ask:
        vectors = await ask("embed", ["w0", "w1 w2"])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1], abs=1e-6)


async def test_dimensions_keep_the_first_values(served, connect):
    async with connect(served.address) as ask:
        vectors = await ask("embed", ["w0 w1"], normalize=False, dimensions=3)
    assert vectors.tolist() == [raw_vector(2, 4, 5, 3)[:3]]


async def test_left_truncation_keeps_the_tail(served, connect):
    text = " ".join(["w0"] * 600 + ["w9"])
    async with connect(served.address) as ask:
        (rows,) = await ask("embed_all", [text], truncate=True, truncation_direction="left")
    assert rows[-2:, 0].tolist() == [13, 3]


async def test_prompts_are_asked_for_by_name(served, connect):
    async with connect(served.address) as ask:
        with pytest.raises(InvalidInputError, match="query"):
            await ask("embed", "w0", prompt_name="query")


async def test_replies_over_four_megabytes_arrive(served, connect):
    served.runner.answer = lambda entry: (np.repeat(entry.input_ids.astype(np.float32)[:, None], 4096, axis=1),)
    async with connect(served.address) as ask:
        (rows,) = await ask("embed_all", [" ".join(["w1"] * 500)])
    assert rows.shape == (502, 4096)
    assert rows.nbytes > 2**22
    assert np.array_equal(rows[:, 0], [2, *[5] * 500, 3])
    assert np.array_equal(rows[:, 4095], rows[:, 0])


async def test_reply_over_the_callers_limit_is_refused_once(served, connect):
    async with connect(served.address, max_receive_message_size=100) as ask:
        with pytest.raises(TeiClientError, match="larger than max") as caught:
            await ask("embed_all", ["w1 w2 w3 w4"])
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert len(served.runner.batches) == 1


async def test_sparse_vectors(tmp_path, connect):
    model = write_checkpoint(tmp_path, "BertForMaskedLM", vocab_size=204)
    async with serve_fake(model, pooling="splade") as served, connect(served.address) as ask:
        one, two = await ask("embed_sparse", ["w0 w1", "w0 w0"])
    assert one.indices.tolist() == [2, 3, 4, 5]
    assert two.indices.tolist() == [2, 3, 4]
    assert two.values.tolist() == [1, 1, 1]


async def test_predictions_of_texts_and_pairs(tmp_path, connect):
    model = write_checkpoint(tmp_path, "BertForSequenceClassification", id2label={"0": "low", "1": "high"})
    async with serve_fake(model) as served, connect(served.address) as ask:
        served.runner.answer = lambda entry: (np.array([0, len(entry)], np.float32),)
        single, pair = await ask("predict", ["w0", ("w0", "w1")], raw_scores=True)
        ((best, _),) = await ask("predict", [("w0", "w1")])
    assert single == [Prediction("high", 3), Prediction("low", 0)]
    assert pair == [Prediction("high", 5), Prediction("low", 0)]
    assert best.score == pytest.approx(1 / (1 + math.exp(-5)))


def text_logit(entry):
    """The id of the first word of a pair's second text."""
    second = int(np.flatnonzero(entry.input_ids == 3)[0]) + 1
    return (entry.input_ids[second : second + 1].astype(np.float32),)


@pytest.mark.parametrize("texts", [["w5", "w9", "w7"], ["w5", "w9", "w7", "w6"]], ids=["one message", "stream"])
async def test_ranks_are_the_same_below_and_above_the_servers_limit(tmp_path, connect, texts):
    model = write_checkpoint(tmp_path, "BertForSequenceClassification", num_labels=1)
    async with serve_fake(model, max_client_batch_size=3) as served, connect(served.address) as ask:
        served.runner.answer = text_logit
        ranks = await ask("rerank", "w0", texts, raw_scores=True, return_text=True)
        assert (await ask("rerank", "w0", texts))[0].text is None
        with pytest.raises(InvalidInputError, match="`texts` cannot be empty"):
            await ask("rerank", "w0", [])
    assert ranks[:2] == [Rank(1, 13, "w9"), Rank(2, 11, "w7")]
    assert ranks[-1] == Rank(0, 9, "w5")


async def test_tokens_have_offsets_unless_special(served, connect):
    async with connect(served.address) as ask:
        with_special, bare = await ask("tokenize", ["w0 w1", "w2"])
        ((only,),) = await ask("tokenize", ["w2"], add_special_tokens=False)
    assert with_special[0] == Token(2, "[CLS]", True, None, None)
    assert with_special[2] == Token(5, "w1", False, 3, 5)
    assert bare[1] == only == Token(6, "w2", False, 0, 2)


async def test_tokens_become_text_again(served, connect):
    async with connect(served.address) as ask:
        assert await ask("decode", [[2, 4, 5, 3], np.array([6])]) == ["w0 w1", "w2"]
        assert await ask("decode", [[2, 4]], skip_special_tokens=False) == ["[CLS] w0"]


async def test_info_tells_what_is_served(served, connect):
    async with connect(served.address) as ask:
        info = await ask("info")
    assert (info.model_type, info.model_dtype, info.max_input_length) == ("embedding", "float32", 512)
    assert (info.max_client_batch_size, info.max_batch_requests, info.model_sha) == (32, None, None)


async def test_health_is_told_per_service(served, connect):
    async with connect(served.address) as ask:
        assert [await ask("health", service) for service in ("", "tei.v1.Embed")] == [True, True]
        assert not await ask("health", "tei.v1.Rerank")
        with pytest.raises(TeiClientError) as caught:
            await ask("health", "tei.v1.Nothing")
    assert caught.value.code is Code.NOT_FOUND


async def test_key_opens_the_server(tmp_path, connect):
    async with serve_fake(write_checkpoint(tmp_path, "BertModel"), api_key="secret") as served:
        async with connect(served.address, api_key="secret") as ask:
            assert (await ask("embed", ["w0"])).shape == (1, SIZE)
        async with connect(served.address) as ask:
            assert await ask("health")
            with pytest.raises(TeiClientError) as caught:
                await ask("embed", ["w0"])
    assert caught.value.code is Code.UNAUTHENTICATED


async def test_refused_input_is_named_by_its_place(served, connect):
    texts = ["w0"] * 700
    texts[650] = " ".join(["w0"] * 600)
    async with connect(served.address) as ask:
        with pytest.raises(InvalidInputError, match="less than 512 tokens. Given: 602") as caught:
            await ask("embed", texts)
    assert caught.value.index == 650


async def test_model_that_cannot_do_it_says_so(served, connect):
    async with connect(served.address) as ask:
        with pytest.raises(TeiClientError) as caught:
            await ask("predict", ["w0"])
    assert (caught.value.code, caught.value.message) == (
        Code.FAILED_PRECONDITION,
        "Backend error: Model is not a classifier model",
    )


async def test_overloaded_server_is_asked_again(tmp_path, connect):
    model = write_checkpoint(tmp_path, "BertModel")
    async with serve_fake(model, max_concurrent_requests=1) as served, connect(served.address) as ask:
        served.runner.gate.clear()
        first = asyncio.create_task(ask("embed", "w0"))
        await asyncio.to_thread(served.runner.running.wait)
        with pytest.raises(TeiClientError) as caught:
            await ask("embed", "w1")
        served.runner.gate.set()
        await first
    assert (caught.value.code, caught.value.message) == (Code.RESOURCE_EXHAUSTED, "Model is overloaded")


@pytest.mark.parametrize("method", ["embed_all", "embed_sparse", "predict", "tokenize"])
async def test_one_text_is_not_taken_for_a_list_of_letters(connect, method):
    async with connect("127.0.0.1:1") as ask:
        with pytest.raises(TypeError, match="must be a list, not one text"):
            await ask(method, "w0")


async def test_unknown_direction_is_refused_without_a_call(connect):
    async with connect("127.0.0.1:1") as ask:
        with pytest.raises(ValueError, match="`truncation_direction` must be 'right' or 'left'. Given: 'up'"):
            await ask("embed", ["w0"], truncation_direction="up")
