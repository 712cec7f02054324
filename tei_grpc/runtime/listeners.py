"""Addresses: claimed before grpc sees them, because a server that shares a port by accident looks healthy and hangs."""

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import grpc

from tei_grpc.config import ServerConfig
from tei_grpc.errors import StartupError

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where a client on this machine finds a wildcard
PROBE_SECONDS = 1.0


@dataclass(frozen=True)
class TcpEndpoint:
    """An IP literal and a port (0 takes a free one) to listen on; `option` is how errors name them."""

    host: str
    port: int
    option: str


@dataclass(frozen=True)
class UnixEndpoint:
    """A Unix socket to listen on; `option` is how errors name it."""

    path: Path
    option: str


Endpoint: TypeAlias = TcpEndpoint | UnixEndpoint


class Address(NamedTuple):
    """Where the server listens (`bound`), and how a client on this machine says it (`local`)."""

    bound: str
    local: str


class Addresses(NamedTuple):
    """Where the server is to be found: with everything, and with health checks only."""

    serving: list[Address]
    health: list[Address]


def serving_endpoints(config: ServerConfig) -> list[Endpoint]:
    """Return where `config` wants all services."""
    first: Endpoint = TcpEndpoint(config.hostname, config.port, f"`--port` {config.port} on {_host_option(config)}")
    if config.uds_listen is not None:
        first = UnixEndpoint(config.uds_listen, f"`--uds-listen` {config.uds_listen}")
    return [first, *(parse_endpoint(text, f"`--listen` {text}") for text in config.listen)]


def health_endpoints(config: ServerConfig) -> list[Endpoint]:
    """Return where `config` wants health checks only."""
    port = config.health_port
    if port is None:
        return []
    return [TcpEndpoint(config.hostname, port, f"`--health-port` {port} on {_host_option(config)}")]


def parse_endpoint(text: str, option: str) -> Endpoint:
    """Read `HOST:PORT`, `[HOST]:PORT` or `unix:PATH`, as the options have checked it."""
    if text.startswith("unix:"):
        return UnixEndpoint(Path(text.removeprefix("unix:")), option)
    host, _, port = text.rpartition(":")
    return TcpEndpoint(host.strip("[]"), int(port), option)


def claim(endpoints: Iterable[Endpoint]) -> None:
    """Check that all of them are to be had, at the same time. Raises StartupError for the first that is not."""
    with ExitStack() as claims:
        for endpoint in endpoints:
            if isinstance(endpoint, TcpEndpoint):
                _claim_port(endpoint, claims)
            else:
                _is_stale(endpoint)


@contextmanager
def reserve(config: ServerConfig) -> Iterator[dict[str, object]]:
    """Hold the ports of `config` for processes that share them; return the options with what port 0 has become.

    Each port is bound by a socket that shares it and never listens: the system gives no connection to it, and
    nobody else, who does not share, gets the port. Raises StartupError for the first that is not to be had.
    """
    serving, health = _tcp(serving_endpoints(config)), _tcp(health_endpoints(config))
    claim([*serving, *health])
    with ExitStack() as holds:
        port, *more = [_hold_port(endpoint, holds) for endpoint in serving]
        listen = tuple(_join(endpoint.host, port) for endpoint, port in zip(serving[1:], more, strict=True))
        update: dict[str, object] = {"port": port, "listen": listen}
        if health:
            update["health_port"] = _hold_port(health[0], holds)
        yield update


def addresses_of(config: ServerConfig) -> Addresses:
    """Return the addresses of a server that listens on ports only, none of them 0."""
    serving, health = _tcp(serving_endpoints(config)), _tcp(health_endpoints(config))
    return Addresses([_address(each, each.port) for each in serving], [_address(each, each.port) for each in health])


def listen(server: grpc.aio.Server, endpoint: Endpoint, credentials: grpc.ServerCredentials | None = None) -> Address:
    """Bind an endpoint that was claimed. Unix sockets are never encrypted: the file's owner and mode guard them.

    Raises StartupError when somebody was quicker.
    """
    if isinstance(endpoint, UnixEndpoint):
        return _listen_unix(server, endpoint)
    port = _add_port(server, _join(endpoint.host, endpoint.port), endpoint.option, credentials)
    return _address(endpoint, port)


def is_local(address: Address) -> bool:
    """Say whether only this machine can reach the address."""
    if address.bound.startswith("unix:"):
        return True
    return ipaddress.ip_address(address.bound.rpartition(":")[0].strip("[]")).is_loopback


def _listen_unix(server: grpc.aio.Server, endpoint: UnixEndpoint) -> Address:
    if _is_stale(endpoint):
        os.unlink(endpoint.path)
    address = f"unix:{endpoint.path}"
    _add_port(server, address, endpoint.option, None)
    return Address(address, address)


def _add_port(server: grpc.aio.Server, address: str, option: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        suspect = "" if credentials is None else ", or gRPC refuses the TLS files"  # it is stricter than OpenSSL
        raise StartupError(f"{option} cannot be bound{suspect}") from None


def _claim_port(endpoint: TcpEndpoint, claims: ExitStack) -> None:
    """Hold the port without grpc: tells why a port is not to be had, and counts sockets that share theirs as taken."""
    with _naming(endpoint):
        _bind(endpoint, claims).listen(1)


def _hold_port(endpoint: TcpEndpoint, holds: ExitStack) -> int:
    """Bind alone, which fails if anybody was quicker, and share only then; return the port."""
    with _naming(endpoint):
        hold = _bind(endpoint, holds)
        hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port: int = hold.getsockname()[1]
        return port


def _bind(endpoint: TcpEndpoint, sockets: ExitStack) -> socket.socket:
    bound = sockets.enter_context(socket.socket(socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a past server may linger
    bound.bind((endpoint.host, endpoint.port))
    return bound


@contextmanager
def _naming(endpoint: TcpEndpoint) -> Iterator[None]:
    """Raises StartupError that names the option for any error of the system."""
    try:
        yield
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error.strerror})"
        raise StartupError(f"{endpoint.option} {reason}") from None


def _tcp(endpoints: Iterable[Endpoint]) -> list[TcpEndpoint]:
    return [endpoint for endpoint in endpoints if isinstance(endpoint, TcpEndpoint)]


def _host_option(config: ServerConfig) -> str:
    return f"`--hostname` {config.hostname}"


def _address(endpoint: TcpEndpoint, port: int) -> Address:
    host = endpoint.host
    return Address(_join(host, port), _join(WILDCARDS.get(host, host), port))


def _is_stale(endpoint: UnixEndpoint) -> bool:
    """Say whether a server that is gone has left its socket there. Raises StartupError when the path is somebody's."""
    try:
        mode = endpoint.path.lstat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StartupError(f"{endpoint.option} cannot be bound ({error.strerror})") from None
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"{endpoint.option} exists and is not a socket")
    if _is_answered(endpoint.path):
        raise StartupError(f"{endpoint.option} is in use: a server answers there")
    return True


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # no permission, or too busy to accept: somebody's
    return True


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
