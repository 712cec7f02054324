"""The server's stubs, the client's and a user's own live in one process, as one set of messages."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import tei_client.pb.tei_pb2
import tei_client.pb.tei_pb2_grpc

import tei_grpc.pb.tei_pb2
from tests.needs import need

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = ROOT / ".venv-proto" / "bin" / "python"


@pytest.fixture
def own_stubs(tmp_path, monkeypatch):
    """Stubs that a user generates from tei.proto, with nothing edited."""
    need(GENERATOR.exists(), f"{GENERATOR} is missing: make proto-check")
    outputs = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    command = [GENERATOR, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *outputs, "tei.proto"]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("tei_pb2"), importlib.import_module("tei_pb2_grpc")
    del sys.modules["tei_pb2"], sys.modules["tei_pb2_grpc"]


def test_three_copies_are_one_descriptor(own_stubs):
    own, _ = own_stubs
    files = [module.DESCRIPTOR for module in (own, tei_client.pb.tei_pb2, tei_grpc.pb.tei_pb2)]
    assert len({file.serialized_pb for file in files}) == 1
    for name in files[0].message_types_by_name:
        assert getattr(own, name) is getattr(tei_client.pb.tei_pb2, name) is getattr(tei_grpc.pb.tei_pb2, name)


async def test_one_message_travels_through_all_three(served, connect, own_stubs):
    own, own_grpc = own_stubs
    theirs = await own_grpc.EmbedStub(served.channel).Embed(own.EmbedRequest(inputs="w0"))
    ours = await tei_client.pb.tei_pb2_grpc.EmbedStub(served.channel).Embed(own.EmbedRequest(inputs="w0"))
    async with connect(served.address) as ask:
        assert list(theirs.embeddings) == list(ours.embeddings) == (await ask("embed", "w0")).tolist()
