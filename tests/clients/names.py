"""A name server for one name, whose addresses a test adds and removes: a headless Kubernetes service."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address

A = 1
HEADER = struct.Struct(">6H")  # RFC 1035, 4.1.1
ANSWER_OF_QUESTION = b"\xc0\x0c"  # a pointer to the name in the question, 4.1.4
RESPONSE = 0x8400  # an authoritative answer without an error


class Names(asyncio.DatagramProtocol):
    """Answers any question for an IPv4 address with `addresses`, every other one with nothing."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.target = ""

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, client: tuple[str, int]) -> None:
        id, *_ = HEADER.unpack_from(data)
        end = data.index(b"\0", HEADER.size) + 5  # the name's end, type and class
        kind = int.from_bytes(data[end - 4 : end - 2])
        addresses = self.addresses if kind == A else []
        answers = [
            ANSWER_OF_QUESTION + struct.pack(">HHIH", A, 1, 0, 4) + IPv4Address(address).packed for address in addresses
        ]
        head = HEADER.pack(id, RESPONSE, 1, len(answers), 0, 0)
        self._transport.sendto(head + data[HEADER.size : end] + b"".join(answers), client)


@asynccontextmanager
async def serve_names(port: int) -> AsyncIterator[Names]:
    """Serve on the loopback; `target` is what a gRPC client connects to, for servers on `port` of every address."""
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(Names, ("127.0.0.1", 0))
    names.target = f"dns://127.0.0.1:{transport.get_extra_info('sockname')[1]}/tei.test:{port}"
    try:
        yield names
    finally:
        transport.close()
