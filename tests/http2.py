"""HTTP/2 by hand (RFC 9113): what no gRPC library lets one say."""

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
END_HEADERS = 4
ENHANCE_YOUR_CALM = 11
FRAME_HEADER = 9  # bytes


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """A frame (RFC 9113, 4.1); on stream 0 it is about the connection as a whole."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The kind and the payload of the next frame. Raises IncompleteReadError at the end."""
    header = await reader.readexactly(FRAME_HEADER)
    return header[3], await reader.readexactly(int.from_bytes(header[:3]))


def error_of(goaway: bytes) -> int:
    """The error code in the payload of a GOAWAY frame (RFC 9113, 6.8)."""
    return int.from_bytes(goaway[4:8])


def header_block(path: str, key: str) -> bytes:
    """The headers of a gRPC request, literal without indexing (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
        "authorization": f"Bearer {key}",
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
