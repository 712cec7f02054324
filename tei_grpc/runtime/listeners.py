"""Addresses: claimed before grpc sees them, because a server that shares a port by accident looks healthy and hangs."""

import errno
import os
import socket
import stat
from pathlib import Path
from typing import NamedTuple

import grpc

from tei_grpc.errors import StartupError

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where a client on this machine finds a wildcard
PROBE_SECONDS = 1.0


class Address(NamedTuple):
    """Where the server listens (`bound`), and how a client on this machine says it (`local`)."""

    bound: str
    local: str


def listen_tcp(server: grpc.aio.Server, host: str, port: int) -> Address:
    """Bind `host` (an IP literal) and `port` (0 takes a free one). Raises StartupError when it is not to be had."""
    host = host.strip("[]")
    _claim(host, port)
    try:
        port = server.add_insecure_port(_join(host, port))
    except RuntimeError:
        raise StartupError(_taken(host, port, "cannot be bound")) from None
    return Address(_join(host, port), _join(WILDCARDS.get(host, host), port))


def listen_uds(server: grpc.aio.Server, path: Path) -> Address:
    """Bind a Unix socket, after removing one that nobody answers on. Raises StartupError when it is in use."""
    _clear(path)
    address = f"unix:{path}"
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise StartupError(f"`--uds-listen`: cannot bind the Unix socket {str(path)!r}") from None
    return Address(address, address)


def _claim(host: str, port: int) -> None:
    """Bind and let go: tells why a port is not to be had, and counts sockets that share theirs as taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as claim:
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a past server may linger
            claim.bind((host, port))
            claim.listen(1)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error.strerror})"
        raise StartupError(_taken(host, port, reason)) from None


def _taken(host: str, port: int, reason: str) -> str:
    return f"`--port` {port} on `--hostname` {host} {reason}"


def _clear(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartupError(f"`--uds-listen`: cannot use {str(path)!r} ({error.strerror})") from None
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"`--uds-listen`: {str(path)!r} exists and is not a socket")
    if _is_answered(path):
        raise StartupError(f"`--uds-listen`: another server answers on {str(path)!r}")
    os.unlink(path)


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
