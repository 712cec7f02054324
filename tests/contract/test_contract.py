"""The wire contract and its stubs: pinned, complete, and light."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tei_grpc.pb import tei_pb2
from tei_grpc.servicers.embed import EmbedServicer
from tei_grpc.servicers.info import InfoServicer
from tei_grpc.servicers.predict import PredictServicer
from tei_grpc.servicers.rerank import RerankServicer
from tei_grpc.servicers.tokenize import TokenizeServicer

ROOT = Path(__file__).resolve().parents[2]
SERVER_STUBS = ROOT / "tei_grpc" / "pb"
CLIENT_STUBS = ROOT / "clients" / "python" / "tei_client" / "pb"

# Changes only when the wire contract does, which is: never. New services go into a package of their own.
DESCRIPTOR_SHA256 = "79e6f7b39c76f623737ffec7ef615ec1b1d3c12e548d566a6b47798f4cbc0d21"

SERVICERS = {
    "Info": InfoServicer,
    "Embed": EmbedServicer,
    "Predict": PredictServicer,
    "Rerank": RerankServicer,
    "Tokenize": TokenizeServicer,
}
RPCS = [
    (service.name, method.name)
    for service in tei_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def test_descriptor_never_changes():
    assert hashlib.sha256(tei_pb2.DESCRIPTOR.serialized_pb).hexdigest() == DESCRIPTOR_SHA256


def test_contract_has_17_rpcs_in_5_services():
    assert (len(RPCS), len(SERVICERS)) == (17, 5)
    assert set(SERVICERS) == set(tei_pb2.DESCRIPTOR.services_by_name)


@pytest.mark.parametrize(("service", "method"), RPCS)
def test_every_rpc_is_implemented(service, method):
    assert method in vars(SERVICERS[service])


@pytest.mark.parametrize("name", ["tei_pb2.py", "tei_pb2.pyi", "tei_pb2_grpc.py"])
def test_server_and_client_carry_the_same_stubs(name):
    assert (SERVER_STUBS / name).read_bytes() == (CLIENT_STUBS / name).read_bytes()


def run(code):
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(CLIENT_STUBS.parents[1])!r}]\n"
    return subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module",
    [
        "tei_grpc.pb.tei_pb2_grpc",
        "tei_client.pb.tei_pb2_grpc",
        "tei_grpc.commands.health",
        "tei_grpc.servicers",
        "tei_grpc.serve.grpc_server",
    ],
)
def test_importing_does_not_load_torch(module):
    code = f"import {module}\nsys.exit(not {{'torch', 'transformers'}}.isdisjoint(sys.modules))"
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_server_and_client_stubs_live_in_one_process():
    code = "from tei_grpc.pb import tei_pb2 as a\nfrom tei_client.pb import tei_pb2 as b\n"
    result = run(
        code + "assert a.EmbedRequest is b.EmbedRequest or a.EmbedRequest().DESCRIPTOR is b.EmbedRequest().DESCRIPTOR"
    )
    assert result.returncode == 0, result.stderr
