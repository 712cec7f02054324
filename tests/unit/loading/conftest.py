"""A hub for the client library to talk to, and a way to be sure that it talks to nobody."""

import socket
from contextlib import ExitStack

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.hub import Hub, serve

REPO = "acme/tiny"
NAMES = (
    "config.json",
    "tokenizer.json",
    "1_Pooling/config.json",
    "model.safetensors",
    "pytorch_model.bin",
    "onnx/model.onnx",
    "onnx/config.json",
    "README.md",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
)
FILES = {name: name.encode() for name in NAMES}


@pytest.fixture
def serve_hub(monkeypatch):
    """Start a hub and make it the one that the client library talks to."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with ExitStack() as stack:

        def start(**options) -> Hub:
            served = stack.enter_context(serve(Hub(REPO, **{"files": FILES, **options})))
            point_at(served.endpoint)
            return served

        def point_at(endpoint: str) -> None:
            monkeypatch.setattr(constants, "ENDPOINT", endpoint)
            template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            huggingface_hub.close_session()

        yield start
        huggingface_hub.close_session()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def no_network_later(request):
    return lambda: request.getfixturevalue("no_network")
