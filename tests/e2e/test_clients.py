"""The clients that people have meet a server with the real MiniLM."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.e2e.servers import Server

BIN = Path(sys.executable).parent

# what text-embeddings-inference answers to "test" with 128 dimensions, and the distance that its own tests allow
TEST_128 = [0.020964134, 0.04565805, -0.066505864, 0.10739273, -0.013054413, -0.07467599, 0.13989426, 0.06780755]
TOLERANCE = 4e-3


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / command[0]), *command[1:]], capture_output=True, text=True, timeout=60)


def grpcurl(address: str, method: str, request: dict[str, object] | None = None) -> Any:
    """Call a method as the shell does, without a proto file."""
    call = run("grpcurl", "-plaintext", "-emit-defaults", "-d", json.dumps(request or {}), address, method)
    assert call.returncode == 0, call.stderr
    return json.loads(call.stdout)


def test_grpcurl_embeds(server: Server) -> None:
    reply = grpcurl(server.address, "tei.v1.Embed/Embed", {"inputs": "test", "dimensions": 128})
    assert len(reply["embeddings"]) == 128
    assert reply["embeddings"][:8] == pytest.approx(TEST_128, abs=TOLERANCE)
    assert reply["metadata"]["computeTokens"] == 3  # [CLS] test [SEP]


def test_grpcurl_lists_the_services(server: Server) -> None:
    names = run("grpcurl", "-plaintext", server.address, "list").stdout.split()
    services = {f"tei.v1.{name}" for name in ("Info", "Embed", "Predict", "Rerank", "Tokenize")}
    assert services | {"grpc.health.v1.Health"} <= set(names)


def test_grpcurl_reads_what_is_served(server: Server) -> None:
    info = grpcurl(server.address, "tei.v1.Info/Info")
    assert (info["modelType"], info["modelDtype"]) == ("MODEL_TYPE_EMBEDDING", "float32")
    assert info["maxInputLength"] == 256  # max_seq_length of the checkpoint
    assert (info["maxConcurrentRequests"], info["maxBatchTokens"], info["maxClientBatchSize"]) == (512, 16384, 32)


def test_grpcurl_asks_for_health(server: Server) -> None:
    assert grpcurl(server.address, "grpc.health.v1.Health/Check") == {"status": "SERVING"}


def test_grpcurl_is_told_what_is_wrong_with_a_request(server: Server) -> None:
    call = run("grpcurl", "-plaintext", "-d", '{"inputs": ""}', server.address, "tei.v1.Embed/Embed")
    assert call.returncode != 0
    assert "Code: InvalidArgument" in call.stderr
    assert "Input validation error: " in call.stderr


@pytest.mark.parametrize(
    ("service", "code", "status"),
    [("", 0, "SERVING"), ("tei.v1.Embed", 0, "SERVING"), ("tei.v1.Predict", 1, "NOT_SERVING")],
)
def test_probe_tells_by_its_exit_code(server: Server, service: str, code: int, status: str) -> None:
    probe = run("tei-grpc", "health", "--address", server.address, "--service", service)
    assert (probe.returncode, probe.stdout) == (code, f"{server.address}: {status}\n")


def test_probe_fails_where_nobody_listens(server: Server) -> None:
    assert run("tei-grpc", "health", "--address", "127.0.0.1:1", "--timeout", "1").returncode == 1


def test_python_stubs_embed(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        reply = tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="test", dimensions=128))
    assert reply.embeddings[:8] == pytest.approx(TEST_128, abs=TOLERANCE)


def test_python_stubs_stream_in_order(server: Server) -> None:
    texts = ["one", "two and some more words to make it longer", "three"]
    with grpc.insecure_channel(server.address) as channel:
        stub = tei_pb2_grpc.EmbedStub(channel)
        streamed = list(stub.EmbedStream(tei_pb2.EmbedRequest(inputs=text) for text in texts))
        alone = [stub.Embed(tei_pb2.EmbedRequest(inputs=text)) for text in texts]
    assert len(streamed) == 3
    for one, other in zip(streamed, alone, strict=True):
        assert list(one.embeddings) == pytest.approx(list(other.embeddings), abs=1e-6)


def test_client_without_stubs_finds_its_way_by_reflection_v1(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        pool = descriptor_pool.DescriptorPool()
        for file in reflected_files(channel, "tei.v1.Embed"):
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
        method = pool.FindServiceByName("tei.v1.Embed").FindMethodByName("Embed")
        request = message_factory.GetMessageClass(method.input_type)(inputs="test", dimensions=8)
        answer = message_factory.GetMessageClass(method.output_type)
        embed = channel.unary_unary(
            "/tei.v1.Embed/Embed",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        assert len(embed(request).embeddings) == 8


def reflected_files(channel: grpc.Channel, symbol: str) -> list[bytes]:
    """Ask grpc.reflection.v1, whose messages are those of v1alpha, for the file that defines `symbol`."""
    ask = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    question = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    (answer,) = ask(iter([question]))
    return list(answer.file_descriptor_response.file_descriptor_proto)
