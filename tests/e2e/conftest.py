"""Servers for the tests of this directory, and the ends of those servers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.servers import Server


@pytest.fixture(scope="module")
def server(minilm_dir: Path) -> Iterator[Server]:
    """One server with the real MiniLM for all tests of a file that do not end it."""
    server = Server("--model-id", str(minilm_dir))
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


@pytest.fixture
def start_server(minilm_dir: Path) -> Iterator[Callable[..., Server]]:
    """Start servers of the test's own; all are ended with the test."""
    servers: list[Server] = []

    def start(*options: str, **environment: str) -> Server:
        servers.append(Server("--model-id", str(minilm_dir), *options, **environment))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
