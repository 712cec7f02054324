"""What a server's log tells, and what it never tells."""

import json
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.e2e.servers import Server

MARK = "Zanzibar"
SECRETS = ("SESAME", "hf_SESAME", "IFTAH")
Start = Callable[..., Server]


def outcome(call, request, metadata) -> str:
    """Make a call, whatever comes of it; return its status text."""
    try:
        replies = call(request, metadata=metadata)
        if isinstance(replies, grpc.Call):
            list(replies)
        return ""
    except grpc.RpcError as error:
        return str(error.details())


def use(address: str) -> None:
    """Every kind of call with marked inputs, good and bad, with and without the key."""
    with grpc.insecure_channel(address) as channel:
        embed, tokenize = tei_pb2_grpc.EmbedStub(channel), tei_pb2_grpc.TokenizeStub(channel)
        predict, rerank = tei_pb2_grpc.PredictStub(channel), tei_pb2_grpc.RerankStub(channel)
        long = f"{MARK} " * 1000
        for metadata in ((("authorization", "Bearer SESAME"),), (("authorization", "Bearer IFTAH2"),)):
            for text in (MARK, long, "x" * 10**6 + MARK):
                outcome(embed.Embed, tei_pb2.EmbedRequest(inputs=text), metadata)
                outcome(embed.EmbedAll, tei_pb2.EmbedAllRequest(inputs=text, truncate=True), metadata)
                outcome(embed.EmbedSparse, tei_pb2.EmbedSparseRequest(inputs=text), metadata)
                outcome(embed.EmbedStream, iter([tei_pb2.EmbedRequest(inputs=text)]), metadata)
                outcome(tokenize.Tokenize, tei_pb2.EncodeRequest(inputs=text), metadata)
                outcome(predict.Predict, tei_pb2.PredictRequest(inputs=text), metadata)
                outcome(rerank.Rerank, tei_pb2.RerankRequest(query=text, texts=[text]), metadata)


@pytest.mark.parametrize("options", [(), ("--json-output=false",)])
def test_neither_secrets_nor_inputs_are_in_the_log(
    start_server: Start, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "keys").write_text("IFTAH\n")
    keys = ("--api-key", "SESAME", "--api-key-file", str(tmp_path / "keys"))
    server = start_server(*keys, *options, HF_TOKEN="hf_SESAME", LOG_LEVEL="debug").wait_until_ready()
    use(server.address)
    assert server.terminate() == 0
    text = "".join(server.lines)
    assert "Success" in text
    assert "must have less than" in text
    assert [secret for secret in (*SECRETS, MARK) if secret.lower() in text.lower()] == []


def test_start_says_what_is_served_and_every_request_has_a_line(start_server: Start) -> None:
    server = start_server().wait_until_ready()
    with grpc.insecure_channel(server.address) as channel:
        tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="test"))
    assert server.terminate() == 0
    lines = [json.loads(line) for line in server.lines]
    [start] = [line for line in lines if line["message"].startswith("Serving on")]
    assert (start["kind"], start["pooling"], start["path"], start["dtype"]) == (
        "embedding",
        ["mean"],
        "packed",
        "float32",
    )
    assert (start["max_input_length"], start["max_batch_tokens"], start["prompts"]) == (256, 16384, [])
    [request] = [line for line in lines if line["message"] == "Success"]
    assert request["span"].keys() >= {"request_id", "kind", "method", "total_time", "queue_time", "compute_tokens"}


def test_request_without_its_span_is_still_a_line(start_server: Start) -> None:
    server = start_server("--disable-spans").wait_until_ready()
    with grpc.insecure_channel(server.address) as channel:
        tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="test"))
    assert server.terminate() == 0
    [request] = [json.loads(line) for line in server.lines if '"Success"' in line]
    assert "span" not in request
    assert "spans" not in request
