"""The gRPC front door: composes server, servicers, health and reflection, and walks them through their life."""

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2_grpc

from tei_grpc.config import ServerConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError
from tei_grpc.rpc.calls import RunningCalls
from tei_grpc.rpc.health import HealthServicer
from tei_grpc.rpc.interceptors import ErrorInterceptor, KeyInterceptor, StateInterceptor
from tei_grpc.rpc.reflection import add_reflection
from tei_grpc.runtime import notices
from tei_grpc.runtime.drain import CUT_SECONDS, drain
from tei_grpc.runtime.listeners import Address, Endpoint, TcpEndpoint, UnixEndpoint, claim, listen, parse_endpoint
from tei_grpc.runtime.signals import StopSignal, end_process, on_hangup
from tei_grpc.runtime.tls import read_certificates
from tei_grpc.servicers import add_servicers
from tei_grpc.types import State

logger = logging.getLogger(__name__)

MAX_PENDING_CALLS = 16_384
TRANSPORT = (
    ("grpc.so_reuseport", 0),
    # gRPC itself cancels calls that wait for the event loop, at random from the first number on (1000 by default), all
    # from the second; callers shall be told RESOURCE_EXHAUSTED instead. Such a call takes 16 kB.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # Clients may ping every 5 s, also without calls; a second less, because a ping that comes early counts as abuse.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 4000),
    ("grpc.server_handshake_timeout_ms", 20_000),  # a connection that says nothing holds a file descriptor
)


class Addresses(NamedTuple):
    """Where the server is to be found: with everything, and with health checks only."""

    serving: list[Address]
    health: list[Address]


async def serve(config: ServerConfig, engine: Engine) -> int:
    """Serve `engine` until a signal comes; return the process's exit code. Raises nothing: errors go to stderr."""
    try:
        server = GrpcServer(config, engine)
        with StopSignal() as stop, on_hangup(server.reload) if config.has_files_to_reload else nullcontext():
            await server.run(stop)
    except StartupError as error:
        for line in error.message.splitlines():
            print(f"tei-grpc: {line}", file=sys.stderr)
        return 1
    if engine.is_stuck:
        end_process(1)  # the interpreter cannot end while a thread computes: it would abort
    return 0


class GrpcServer:
    """One engine behind a server, and beside it one that only answers health checks (on `--health-port`).

    Ports are bound, and health answers, before the engine is loaded.
    """

    def __init__(self, config: ServerConfig, engine: Engine) -> None:
        """Raises StartupError when keys or certificates cannot be read."""
        self._config = config
        self._engine = engine
        self._keys = _key_interceptor(config)
        self._certificates = read_certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._calls = RunningCalls()
        self._health = HealthServicer()
        self._server = self._compose()
        self._health_server = self._compose_health()

    async def run(self, stop: StopSignal) -> None:
        """Listen, load, serve, drain. Raises StartupError."""
        addresses = await self.start()
        loading = asyncio.create_task(self._load(addresses))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                end_process(0)  # neither a download nor a load can be interrupted, and no call is lost
            loading.result()
            await stopping
        finally:
            stopping.cancel()
            await self.stop()

    def reload(self) -> None:
        """Read keys and certificates from their files anew, for calls and handshakes from now on. Raises nothing.

        What is wrong with a file is an error in the log, and all that it should have changed stays as it was.
        """
        if self._config.api_key_file is not None:
            _renew("keys", self._renew_keys)
        if self._certificates is not None:
            _renew("certificates", self._certificates.reload)

    def _credentials(self) -> grpc.ServerCredentials | None:
        """Of one port."""
        return None if self._certificates is None else self._certificates.credentials()

    def _renew_keys(self) -> None:
        if self._keys is not None:
            self._keys.accept(self._config.api_keys())

    async def start(self) -> Addresses:
        """Listen, and answer health checks. Raises StartupError when an address is not to be had."""
        config = self._config
        serving, health = _serving_endpoints(config), _health_endpoints(config)
        claim([*serving, *health])
        addresses = Addresses(
            [listen(self._server, endpoint, self._credentials()) for endpoint in serving],
            [listen(self._health_server, endpoint) for endpoint in health],
        )
        await self._health_server.start()
        await self._server.start()
        return addresses

    async def stop(self) -> None:
        """Turn health, go on while load balancers notice, drain, and stop the engine."""
        self._health.withdraw()
        if self._engine.state is State.SERVING:  # otherwise no balancer has sent anybody here
            await asyncio.sleep(self._config.shutdown_delay)
        self._engine.drain()
        self._health.end()
        await drain(self._server, self._calls, grace=self._config.shutdown_grace)
        await self._health_server.stop(CUT_SECONDS)
        await self._engine.stop()
        logger.info("Stopped")

    async def _load(self, addresses: Addresses) -> None:
        where = _join(addresses.serving)
        logger.info("Listening on %s, loading the model", where)
        if addresses.health:
            logger.info("Answering health checks on %s", _join(addresses.health))
        if self._keys is None and self._config.tls_cert is None:
            notices.warn_if_open(addresses.serving)
        await self._engine.start()
        gc.freeze()  # what is there now stays: to walk through it at every full collection takes 0.1 s
        notices.note_large_replies(self._engine.info, self._config.max_send_message_size)
        example = _example(addresses.serving[0].local, self._config, with_key=self._keys is not None)
        logger.info("Serving on %s. Try: %s", where, example, extra=notices.describe(self._engine.info))

    def _compose(self) -> grpc.aio.Server:
        """Outermost interceptor first."""
        interceptors = [
            ErrorInterceptor(self._calls, self._engine.metrics, traced=self._config.otlp_endpoint is not None),
            *([] if self._keys is None else [self._keys]),
            StateInterceptor(lambda: self._engine.state),
        ]
        server = grpc.aio.server(interceptors=interceptors, options=_options(self._config))
        add_servicers(server, self._engine, window=self._config.grpc_max_parallel_stream_requests)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection(server)
        self._engine.on_state(self._follow)
        return server

    def _compose_health(self) -> grpc.aio.Server:
        """Without `--health-port` it has no listener."""
        server = grpc.aio.server(interceptors=[ErrorInterceptor(self._calls, self._engine.metrics)], options=TRANSPORT)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server

    def _follow(self, state: State) -> None:
        self._health.follow(state, self._engine.info.model_type if state is State.SERVING else None)


def _key_interceptor(config: ServerConfig) -> KeyInterceptor | None:
    keys = config.api_keys()
    return KeyInterceptor(keys) if keys else None


def _renew(what: str, renew: Callable[[], None]) -> None:
    try:
        renew()
    except StartupError as error:
        logger.error("%s; the %s stay as they were", error.message, what)
    else:
        logger.info("The %s have been read anew", what)


def _serving_endpoints(config: ServerConfig) -> list[Endpoint]:
    first: Endpoint = TcpEndpoint(config.hostname, config.port, f"`--port` {config.port} on {_host_option(config)}")
    if config.uds_listen is not None:
        first = UnixEndpoint(config.uds_listen, f"`--uds-listen` {config.uds_listen}")
    return [first, *(parse_endpoint(text, f"`--listen` {text}") for text in config.listen)]


def _health_endpoints(config: ServerConfig) -> list[Endpoint]:
    port = config.health_port
    if port is None:
        return []
    return [TcpEndpoint(config.hostname, port, f"`--health-port` {port} on {_host_option(config)}")]


def _host_option(config: ServerConfig) -> str:
    return f"`--hostname` {config.hostname}"


def _join(addresses: list[Address]) -> str:
    return ", ".join(address.bound for address in addresses)


def _example(address: str, config: ServerConfig, *, with_key: bool) -> str:
    """Return a command to try the server with."""
    where, trust = address, "-plaintext"
    if address.startswith("unix:"):
        where = f"-unix {address.removeprefix('unix:')}"
    elif config.tls_cert is not None:
        trust = "-cacert CA.pem" + (" -cert CERT.pem -key KEY.pem" if config.tls_client_ca is not None else "")
    key = " -H 'authorization: Bearer KEY'" if with_key else ""
    return f"""grpcurl -d '{{"inputs": "What is Deep Learning"}}' {trust}{key} {where} tei.v1.Embed/Embed"""


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        *TRANSPORT,
        ("grpc.max_receive_message_length", config.max_recv_message_size),
        ("grpc.max_send_message_length", config.max_send_message_size),
        ("grpc.max_concurrent_streams", config.max_connection_streams),
        *(
            []
            if config.max_connections is None
            else [("grpc.max_allowed_incoming_connections", config.max_connections)]
        ),
        *_milliseconds("grpc.max_connection_age_ms", config.max_connection_age),
        *_milliseconds("grpc.max_connection_age_grace_ms", config.max_connection_age_grace),
    ]


def _milliseconds(option: str, seconds: float | None) -> list[tuple[str, int]]:
    return [] if seconds is None else [(option, round(seconds * 1000))]
