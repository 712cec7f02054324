"""The gRPC front door: composes server, servicers, health and reflection, and walks them through their life."""

import asyncio
import logging
import sys

import grpc
from grpc_health.v1 import health_pb2_grpc

from tei_grpc.config import ServerConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError
from tei_grpc.rpc.calls import RunningCalls
from tei_grpc.rpc.health import HealthServicer
from tei_grpc.rpc.interceptors import ErrorInterceptor, KeyInterceptor, StateInterceptor
from tei_grpc.rpc.reflection import add_reflection
from tei_grpc.runtime.drain import shut_down
from tei_grpc.runtime.listeners import Address, listen_tcp, listen_uds
from tei_grpc.runtime.signals import StopSignal, end_process
from tei_grpc.servicers import add_servicers
from tei_grpc.types import State

logger = logging.getLogger(__name__)

# Clients may ping every 5 s, also without calls; a second less, because a ping that comes early counts as abuse.
MIN_PING_INTERVAL_MS = 4000


async def serve(config: ServerConfig, engine: Engine) -> int:
    """Serve `engine` until a signal comes; return the process's exit code. Raises nothing: errors go to stderr."""
    try:
        with StopSignal() as stop:
            await GrpcServer(config, engine).run(stop)
    except StartupError as error:
        for line in error.message.splitlines():
            print(f"tei-grpc: {line}", file=sys.stderr)
        return 1
    return 0


class GrpcServer:
    """One server around one engine. The port is bound, and health answers, before the engine is loaded."""

    def __init__(self, config: ServerConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._calls = RunningCalls()
        self._health = HealthServicer()
        self._server = self._compose()

    async def run(self, stop: StopSignal) -> None:
        """Listen, load, serve, drain. Raises StartupError."""
        address = await self.start()
        loading = asyncio.create_task(self._load(address))
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

    async def start(self) -> Address:
        """Listen, and answer health checks. Raises StartupError when the address is not to be had."""
        config = self._config
        if config.uds_listen is not None:
            address = listen_uds(self._server, config.uds_listen)
        else:
            address = listen_tcp(self._server, config.hostname, config.port)
        await self._server.start()
        return address

    async def stop(self) -> None:
        """Drain and end; an engine that is not serving has no balancer to wait for."""
        delay = self._config.shutdown_delay if self._engine.state is State.SERVING else 0.0
        grace = self._config.shutdown_grace
        await shut_down(self._server, self._engine, self._health, self._calls, delay=delay, grace=grace)

    async def _load(self, address: Address) -> None:
        logger.info("Listening on %s, loading the model", address.bound)
        await self._engine.start()
        logger.info("Serving on %s. Try: %s", address.bound, _example(address.local))

    def _compose(self) -> grpc.aio.Server:
        """Outermost interceptor first."""
        keys = self._config.api_keys()
        interceptors = [
            ErrorInterceptor(self._calls),
            *([KeyInterceptor(keys)] if keys else []),
            StateInterceptor(lambda: self._engine.state),
        ]
        server = grpc.aio.server(interceptors=interceptors, options=_options(self._config))
        add_servicers(server, self._engine, window=self._config.grpc_max_parallel_stream_requests)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection(server)
        self._engine.on_state(self._follow)
        return server

    def _follow(self, state: State) -> None:
        self._health.follow(state, self._engine.info.model_type if state is State.SERVING else None)


def _example(address: str) -> str:
    """Return a command to try the server with."""
    where = f"-unix {address.removeprefix('unix:')}" if address.startswith("unix:") else address
    return f"""grpcurl -d '{{"inputs": "What is Deep Learning"}}' -plaintext {where} tei.v1.Embed/Embed"""


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_recv_message_size),
        ("grpc.max_send_message_length", config.max_send_message_size),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ]
