import socket

import grpc
import pytest

from tei_grpc.errors import StartupError
from tei_grpc.runtime.listeners import listen_tcp, listen_uds


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.fixture
async def server():
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    yield server
    await server.stop(None)


@pytest.mark.parametrize(
    ("host", "bound", "local"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1"),
        pytest.param("::1", "[::1]", "[::1]", marks=needs_ipv6),
        pytest.param("[::1]", "[::1]", "[::1]", marks=needs_ipv6),
        pytest.param("::", "[::]", "[::1]", marks=needs_ipv6),
    ],
)
async def test_port_0_is_reported_as_the_port_it_became(server, host, bound, local):
    address = listen_tcp(server, host, 0)
    port = int(address.bound.rpartition(":")[2])
    assert port > 0
    assert address == (f"{bound}:{port}", f"{local}:{port}")


@pytest.mark.parametrize("reuse_port", [0, 1])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_taken_port_is_refused_by_name(server, host, reuse_port):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        other.bind((host, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError) as caught:
            listen_tcp(server, host, port)
    assert caught.value.message == f"`--port` {port} on `--hostname` {host} is in use"


async def test_address_of_another_machine_is_refused(server):
    with pytest.raises(StartupError, match=r"`--hostname` 192\.0\.2\.1 cannot be bound"):
        listen_tcp(server, "192.0.2.1", 0)


async def test_second_server_on_the_same_port_is_refused(server):
    first = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = int(listen_tcp(first, "127.0.0.1", 0).bound.rpartition(":")[2])
    await first.start()
    with pytest.raises(StartupError, match="is in use"):
        listen_tcp(server, "127.0.0.1", port)
    await first.stop(None)


async def test_unix_socket_that_is_answered_is_left_alone(server, tmp_path):
    path = tmp_path / "tei.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(StartupError, match="`--uds-listen`: another server answers"):
            listen_uds(server, path)
        assert path.exists()


async def test_stale_unix_socket_is_replaced(server, tmp_path):
    path = tmp_path / "tei.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    address = listen_uds(server, path)
    assert address == (f"unix:{path}", f"unix:{path}")
    await server.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


async def test_file_that_is_no_socket_is_left_alone(server, tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(StartupError, match="exists and is not a socket"):
        listen_uds(server, path)
    assert path.read_text() == "data"


@pytest.mark.parametrize("name", ["missing/tei.sock", "x" * 120])
async def test_impossible_unix_socket_is_refused(server, tmp_path, name):
    with pytest.raises(StartupError, match="`--uds-listen`"):
        listen_uds(server, tmp_path / name)
