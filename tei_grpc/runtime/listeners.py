"""Addresses: claimed before grpc sees them, because a server that shares a port by accident looks healthy and hangs."""

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import grpc

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


def listen(server: grpc.aio.Server, endpoint: Endpoint, credentials: grpc.ServerCredentials | None = None) -> Address:
    """Bind an endpoint that was claimed. Unix sockets are never encrypted: the file's owner and mode guard them.

    Raises StartupError when somebody was quicker.
    """
    if isinstance(endpoint, UnixEndpoint):
        return _listen_unix(server, endpoint)
    host = endpoint.host
    port = _add_port(server, _join(host, endpoint.port), endpoint.option, credentials)
    return Address(_join(host, port), _join(WILDCARDS.get(host, host), port))


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
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        claim = claims.enter_context(socket.socket(family))
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a past server may linger
        claim.bind((endpoint.host, endpoint.port))
        claim.listen(1)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error.strerror})"
        raise StartupError(f"{endpoint.option} {reason}") from None


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
