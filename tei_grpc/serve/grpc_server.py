"""The gRPC front door: composes server, servicers, health and reflection, and walks them through their life."""

import asyncio
import logging
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2_grpc

from tei_grpc.config import ServerConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError
from tei_grpc.rpc.calls import RunningCalls
from tei_grpc.rpc.gate import Gate, Keys
from tei_grpc.rpc.health import HealthServicer
from tei_grpc.rpc.methods import Methods, Surroundings
from tei_grpc.rpc.operations import take_over_operations
from tei_grpc.rpc.reflection import add_reflection
from tei_grpc.rpc.room import Rooms
from tei_grpc.runtime import life, notices
from tei_grpc.runtime.drain import CUT_SECONDS, drain
from tei_grpc.runtime.listeners import Addresses, claim, health_endpoints, listen, serving_endpoints
from tei_grpc.runtime.tls import read_certificates
from tei_grpc.servicers import add_servicers
from tei_grpc.types import State

logger = logging.getLogger(__name__)

MAX_PENDING_CALLS = 16_384
TRANSPORT = (
    # gRPC itself cancels calls that wait for the event loop, at random from the first number on (1000 by default), all
    # from the second; callers shall be told RESOURCE_EXHAUSTED instead. Such a call takes 16 kB.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # Clients may ping every 5 s, also without calls; a second less, because a ping that comes early counts as abuse.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 4000),
    # Bytes that gRPC takes in of a stream whose messages are not read; by itself it finds out what the network carries,
    # and takes up to 4 MiB. This is enough for 5 MB/s by a stream with a round trip of 50 ms.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 << 10),
    ("grpc.server_handshake_timeout_ms", 20_000),  # a connection that says nothing holds a file descriptor
)


async def serve(config: ServerConfig, engine: Engine) -> int:
    """Serve `engine` until a signal comes; return the process's exit code. Raises nothing: errors go to stderr."""
    return await life.serve(lambda: GrpcServer(config, engine), config)


class GrpcServer:
    """One engine behind a server, and beside it one that only answers health checks (on `--health-port`).

    Ports are bound, and health answers, before the engine is loaded.
    """

    def __init__(self, config: ServerConfig, engine: Engine) -> None:
        """Raises StartupError when keys or certificates cannot be read."""
        take_over_operations()
        self._config = config
        self._engine = engine
        self._keys = _keys(config)
        self._certificates = read_certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._calls = RunningCalls()
        self._health = HealthServicer()
        self._rooms = Rooms(config.grpc_max_parallel_stream_requests)
        self._server = self._compose()
        self._health_server = self._compose_health()

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
        serving, health = serving_endpoints(config), health_endpoints(config)
        if not config.frontends:  # otherwise the parent holds the ports for all of them
            claim([*serving, *health])
        addresses = Addresses(
            [listen(self._server, endpoint, self._credentials()) for endpoint in serving],
            [listen(self._health_server, endpoint) for endpoint in health],
        )
        await self._health_server.start()
        await self._server.start()
        return addresses

    async def load(self, addresses: Addresses) -> None:
        """Start the engine, and say so. Raises StartupError."""
        has_keys = self._keys is not None
        notices.announce_listening(addresses, self._config, has_keys=has_keys)
        await self._engine.start()
        notices.announce_serving(addresses, self._config, self._engine.info, has_keys=has_keys)

    async def stop(self) -> bool:
        """Turn health, go on while load balancers notice, drain, and stop the engine; False when its batch hangs."""
        self._health.withdraw()
        if self._engine.state is State.SERVING:  # otherwise no balancer has sent anybody here
            await asyncio.sleep(self._config.shutdown_delay)
        self._engine.drain()
        self._health.end()
        await drain(self._server, self._calls, grace=self._config.shutdown_grace)
        await self._health_server.stop(CUT_SECONDS)
        await self._engine.stop()
        return not self._engine.is_stuck

    def _compose(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=_options(self._config))
        gate, traced = Gate(lambda: self._engine.state, self._keys), self._config.otlp_endpoint is not None
        methods = Methods(server, Surroundings(self._calls, self._engine.metrics, gate, traced))
        add_servicers(methods, self._engine, self._rooms)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, methods)
        add_reflection(methods)
        self._engine.on_state(self._follow)
        return server

    def _compose_health(self) -> grpc.aio.Server:
        """Without `--health-port` it has no listener."""
        server = grpc.aio.server(options=_transport(self._config))
        methods = Methods(server, Surroundings(self._calls, self._engine.metrics))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, methods)
        return server

    def _follow(self, state: State) -> None:
        self._health.follow(state, self._engine.info.model_type if state is State.SERVING else None)


def _keys(config: ServerConfig) -> Keys | None:
    keys = config.api_keys()
    return Keys(keys) if keys else None


def _renew(what: str, renew: Callable[[], None]) -> None:
    try:
        renew()
    except StartupError as error:
        logger.error("%s; the %s stay as they were", error.message, what)
    else:
        logger.info("The %s have been read anew", what)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        *_transport(config),
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


def _transport(config: ServerConfig) -> list[tuple[str, int]]:
    return [*TRANSPORT, ("grpc.so_reuseport", int(config.frontends > 0))]


def _milliseconds(option: str, seconds: float | None) -> list[tuple[str, int]]:
    return [] if seconds is None else [(option, round(seconds * 1000))]
