"""The conformance suite runs against our own servers, one per kind of model, or against the one at `--address`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tei_grpc.pb import tei_pb2
from tests.contract.targets import Code, Target
from tests.e2e.servers import Server

if TYPE_CHECKING:
    from tests.small_heads import SmallHeads

KEY = "conformance"
PROMPT = "query"
PROMPT_TEXT = "query: "
PROMPTS_FILE = "config_sentence_transformers.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("contract", "conformance with tei.v1")
    group.addoption("--address", help="HOST:PORT of a running server of tei.v1; ours are started when left out")
    group.addoption("--api-key", help="key of the server at --address")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "difference(text): text-embeddings-inference answers otherwise, and how")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("difference"):
            item.user_properties.append(("difference", mark.args[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what differs from text-embeddings-inference on purpose, with how its tests ended."""
    endings: dict[str, set[str]] = {}
    for ending in ("passed", "failed", "skipped"):
        for report in terminalreporter.getreports(ending):
            for name, text in report.user_properties:
                if name == "difference" and (report.when == "call" or ending == "skipped"):
                    endings.setdefault(text, set()).add(ending)
    if endings:
        terminalreporter.section("intended differences from text-embeddings-inference")
    for text, found in endings.items():
        terminalreporter.write_line(f"{'/'.join(sorted(found)):8} {text}")


def kind_of(target: Target) -> str:
    """What the server serves; only a SPLADE model refuses to normalize."""
    kinds = {tei_pb2.MODEL_TYPE_CLASSIFIER: "classifier", tei_pb2.MODEL_TYPE_RERANKER: "reranker"}
    if target.info.model_type in kinds:
        return kinds[target.info.model_type]
    outcome = target.ask("Embed/Embed", tei_pb2.EmbedRequest(inputs="a"))
    return "embedder" if outcome.code is Code.OK else "splade"


class Targets:
    """Servers by kind, each started when it is first asked for."""

    def __init__(self, address: str | None, key: str | None) -> None:
        self._servers: list[Server] = []
        self._targets: dict[str, Target] = {}
        self._is_theirs = address is not None
        if address is not None:
            theirs = Target(address, key)
            self._targets[kind_of(theirs)] = theirs

    def get(self, kind: str, folder: Callable[[], Path], *options: str) -> Target:
        """The server of a kind; one of ours gets the model in `folder()`."""
        if kind not in self._targets:
            if self._is_theirs:
                pytest.skip(f"not a server of this kind: {kind}")
            # one thread each: the servers share the machine, and threads that wait for each other suffer most from it
            server = Server("--model-id", str(folder()), "--api-key", KEY, *options, OMP_NUM_THREADS="1")
            self._servers.append(server)
            self._targets[kind] = Target(server.wait_until_ready().address, KEY, is_ours=True)
        return self._targets[kind]

    def close(self) -> None:
        for target in self._targets.values():
            target.close()
        for server in self._servers:
            server.kill()


@pytest.fixture(scope="session")
def targets(pytestconfig: pytest.Config) -> Iterator[Targets]:
    found = Targets(pytestconfig.getoption("address", None), pytestconfig.getoption("api_key", None))
    yield found
    found.close()


@pytest.fixture(scope="session")
def embedder(targets: Targets, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """MiniLM, with a prompt."""

    def folder() -> Path:
        prompted = tmp_path_factory.mktemp("prompted")
        for file in request.getfixturevalue("minilm_dir").iterdir():
            (prompted / file.name).symlink_to(file)
        (prompted / PROMPTS_FILE).unlink()
        (prompted / PROMPTS_FILE).write_text(json.dumps({"prompts": {PROMPT: PROMPT_TEXT}}))
        return prompted

    return targets.get("embedder", folder)


@pytest.fixture(scope="session")
def splade(targets: Targets, request: pytest.FixtureRequest) -> Target:
    return targets.get("splade", lambda: request.getfixturevalue("splade_dir"), "--pooling", "splade")


@pytest.fixture(scope="session")
def classifier(targets: Targets, request: pytest.FixtureRequest) -> Target:
    """Two labels; few permits, so that overload is near."""
    return targets.get("classifier", lambda: heads(request).sentiment, "--max-concurrent-requests", "2")


@pytest.fixture(scope="session")
def reranker(targets: Targets, request: pytest.FixtureRequest) -> Target:
    """One label; fewer permits than a call has texts."""
    return targets.get("reranker", lambda: heads(request).reranker, "--max-concurrent-requests", "2")


def heads(request: pytest.FixtureRequest) -> "SmallHeads":
    from tests.small_heads import small_heads  # needs torch, which a run against another server does not

    return small_heads(request.getfixturevalue("minilm_dir"))


@pytest.fixture(params=["embedder", "splade", "classifier", "reranker"])
def target(request: pytest.FixtureRequest) -> Target:
    """A server of each kind."""
    found: Target = request.getfixturevalue(request.param)
    return found
