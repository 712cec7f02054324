import logging
from dataclasses import replace

import pytest

from tei_grpc.pb import tei_pb2
from tei_grpc.runtime.listeners import Address
from tei_grpc.runtime.notices import describe, largest_reply, note_large_replies, warn_if_open
from tei_grpc.types import Info, ModelType, Pooling


def info(tokens, hidden, *, embeds_all=True):
    return Info(
        model_id="m",
        model_sha=None,
        model_dtype="float32",
        model_type=ModelType.EMBEDDING,
        device="cpu",
        optimized=True,
        max_concurrent_requests=1,
        max_input_length=tokens,
        max_batch_tokens=1,
        max_batch_requests=None,
        max_client_batch_size=1,
        tokenization_workers=1,
        embeds=True,
        embeds_sparse=not embeds_all,
        embeds_all=embeds_all,
        hidden_size=hidden,
    )


@pytest.fixture
def heard(caplog):
    caplog.set_level(logging.INFO, logger="tei_grpc.runtime.notices")
    return lambda: caplog.messages


def address(bound):
    return Address(bound, bound)


@pytest.mark.parametrize("bound", ["127.0.0.1:3000", "127.1.2.3:3000", "[::1]:3000", "unix:/run/tei.sock"])
@pytest.mark.parametrize("has_keys", [False, True])
def test_nobody_is_warned_of_what_only_this_machine_reaches(heard, bound, has_keys):
    warn_if_open([address(bound)], has_keys=has_keys)
    assert heard() == []


@pytest.mark.parametrize("bound", ["0.0.0.0:3000", "[::]:3000", "192.0.2.1:3000"])
def test_warning_names_the_addresses_that_others_reach(heard, bound):
    warn_if_open([address("127.0.0.1:3000"), address(bound)], has_keys=False)
    assert len(heard()) == 1
    assert f"reach {bound} is served" in heard()[0]


def test_key_that_travels_to_other_machines_unencrypted_is_warned_of(heard):
    warn_if_open([address("127.0.0.1:3000"), address("192.0.2.1:3000")], has_keys=True)
    assert heard() == ["Keys and inputs travel to 192.0.2.1:3000 as they are, unencrypted: see `--tls-cert`"]


# 1,024 floats and 6 bytes around them, per token: 1,022 tokens stay below 4 MiB, 1,023 do not
@pytest.mark.parametrize(("tokens", "size"), [(1022, 4_192_244), (1023, 4_196_346)])
def test_largest_reply_is_the_size_on_the_wire(tokens, size):
    token = tei_pb2.TokenEmbedding(embeddings=[1.0] * 1024)
    assert largest_reply(info(tokens, 1024)) == size
    assert tei_pb2.EmbedAllResponse(token_embeddings=[token] * tokens).ByteSize() == size


def test_replies_that_usual_clients_refuse_are_announced(heard):
    note_large_replies(info(1022, 1024), -1)
    assert heard() == []
    note_large_replies(info(8192, 1024), -1)
    assert heard() == [
        "EmbedAll of the longest input is a reply of 33603584 bytes; "
        "clients accept 4194304 unless they raise `grpc.max_receive_message_length`"
    ]


def test_replies_over_the_servers_own_limit_are_announced(heard):
    note_large_replies(info(10, 10), 100)
    assert heard() == ["EmbedAll of the longest input is a reply of 440 bytes; `--max-send-message-size` is 100 bytes"]


def test_models_without_embed_all_have_no_large_replies(heard):
    note_large_replies(info(8192, 1024, embeds_all=False), 100)
    assert heard() == []


def test_what_is_served_is_told_with_the_names_of_prompts_only():
    told = describe(replace(info(128, 8), pooling=(Pooling.MEAN,), modules=("Dense",), prompts={"query": "search: "}))
    assert told["prompts"] == ["query"]
    assert "search: " not in str(told)
    assert (told["pooling"], told["modules"], told["path"], told["max_input_length"]) == (
        ["mean"],
        ["Dense"],
        "packed",
        128,
    )
