import socket
from pathlib import Path

import grpc
import pytest

from tei_grpc.config import ServerConfig
from tei_grpc.errors import StartupError
from tei_grpc.runtime.listeners import (
    Address,
    TcpEndpoint,
    UnixEndpoint,
    addresses_of,
    claim,
    is_local,
    listen,
    parse_endpoint,
    reserve,
)


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def tcp(port, host="127.0.0.1"):
    return TcpEndpoint(host, port, f"`--port` {port}")


def unix(path):
    return UnixEndpoint(path, "`--uds-listen`")


def port_of(address):
    return int(address.bound.rpartition(":")[2])


@pytest.fixture
async def server():
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    yield server
    await server.stop(None)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:80", TcpEndpoint("127.0.0.1", 80, "x")),
        ("[::1]:80", TcpEndpoint("::1", 80, "x")),
        ("unix:/run/tei.sock", UnixEndpoint(Path("/run/tei.sock"), "x")),
        ("unix:tei.sock", UnixEndpoint(Path("tei.sock"), "x")),
    ],
)
def test_address_as_text(text, endpoint):
    assert parse_endpoint(text, "x") == endpoint


@pytest.mark.parametrize(
    ("host", "bound", "local"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1"),
        pytest.param("::1", "[::1]", "[::1]", marks=needs_ipv6),
        pytest.param("::", "[::]", "[::1]", marks=needs_ipv6),
    ],
)
async def test_port_0_is_reported_as_the_port_it_became(server, host, bound, local):
    address = listen(server, tcp(0, host))
    port = port_of(address)
    assert port > 0
    assert address == (f"{bound}:{port}", f"{local}:{port}")


@pytest.mark.parametrize("reuse_port", [0, 1])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_taken_port_is_refused_by_name(host, reuse_port):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        other.bind((host, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError) as caught:
            claim([tcp(port, host)])
    assert caught.value.message == f"`--port` {port} is in use"


@needs_ipv6
def test_all_addresses_of_both_families_are_the_same_port():
    with socket.create_server(("0.0.0.0", 0)) as other, pytest.raises(StartupError, match="is in use"):
        claim([tcp(other.getsockname()[1], "::")])


@pytest.mark.parametrize("second", ["127.0.0.1", "0.0.0.0"])
def test_port_asked_for_twice_is_refused(second):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(StartupError, match="is in use"):
        claim([tcp(port), tcp(port, second)])


async def test_claimed_port_can_be_had(server):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    claim([tcp(port)])
    assert port_of(listen(server, tcp(port))) == port


async def test_port_of_a_running_server_is_refused(server):
    port = port_of(listen(server, tcp(0)))
    await server.start()
    with pytest.raises(StartupError, match="is in use"):
        claim([tcp(port)])


async def test_port_lost_after_the_claim_is_refused(server):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"`--port` {port} cannot be bound"):
            listen(server, tcp(port))


def test_address_of_another_machine_is_refused_with_the_reason():
    with pytest.raises(StartupError, match=r"`--port` 0 cannot be bound \(Cannot assign requested address\)"):
        claim([tcp(0, "192.0.2.1")])


async def test_unix_socket_that_is_answered_is_left_alone(server, tmp_path):
    path = tmp_path / "tei.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(StartupError, match="`--uds-listen` is in use: a server answers there"):
            claim([unix(path)])
        with pytest.raises(StartupError, match="is in use"):
            listen(server, unix(path))
        assert path.exists()


async def test_stale_unix_socket_is_replaced_when_it_is_needed(server, tmp_path):
    path = tmp_path / "tei.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    claim([unix(path)])
    assert path.exists()
    address = listen(server, unix(path))
    assert address == (f"unix:{path}", f"unix:{path}")
    await server.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(StartupError, match="exists and is not a socket"):
        claim([unix(path)])
    assert path.read_text() == "data"


@pytest.mark.parametrize("name", ["missing/tei.sock", "x" * 120])
async def test_impossible_unix_socket_is_refused(server, tmp_path, name):
    with pytest.raises(StartupError, match="`--uds-listen` cannot be bound"):
        listen(server, unix(tmp_path / name))


@pytest.mark.parametrize(
    ("bound", "local"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("unix:x", True), ("0.0.0.0:1", False), ("[::]:1", False)],
)
def test_local_addresses_are_those_that_other_machines_cannot_reach(bound, local):
    assert is_local(Address(bound, bound)) is local


def config(**options):
    return ServerConfig(hostname="127.0.0.1", **options)


def test_reserved_ports_are_told_and_nobody_else_gets_them():
    with reserve(config(port=0, health_port=0, listen=("127.0.0.1:0",))) as options:
        ports = [options["port"], options["health_port"], int(options["listen"][0].removeprefix("127.0.0.1:"))]
        assert len({*ports, 0}) == 4
        for port in ports:
            with pytest.raises(StartupError, match="is in use"):
                claim([tcp(port)])
            with pytest.raises(StartupError, match="is in use"), reserve(config(port=port)):
                pass
    claim([tcp(port) for port in ports])


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        pytest.param("::1", "::1", marks=needs_ipv6),
        pytest.param("::", "::1", marks=needs_ipv6),
    ],
)
async def test_those_who_share_a_reserved_port_get_all_connections(host, local):
    with reserve(ServerConfig(hostname=host, port=0)) as options:
        servers = [grpc.aio.server(options=[("grpc.so_reuseport", 1)]) for _ in range(2)]
        for server in servers:
            listen(server, tcp(options["port"], host))
            await server.start()
        for _ in range(10):
            socket.create_connection((local, options["port"]), timeout=5).close()
        with pytest.raises(StartupError, match="is in use"):
            claim([tcp(options["port"], host)])
        for server in servers:
            await server.stop(None)


def test_addresses_are_those_that_clients_use():
    shared = config(port=80, listen=("0.0.0.0:81",), health_port=82)
    serving = [Address("127.0.0.1:80", "127.0.0.1:80"), Address("0.0.0.0:81", "127.0.0.1:81")]
    assert addresses_of(shared) == (serving, [Address("127.0.0.1:82", "127.0.0.1:82")])
