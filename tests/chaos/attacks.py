"""Calls that no decent client makes. Each returns what came of it: the name of a status, or "gone" if it left first."""

import asyncio
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc

from tei_grpc.pb import tei_pb2
from tests.http2 import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, header_block

PATIENCE = 60.0  # seconds; whoever waits longer has been hung
MEGABYTE = 1_000_000
KEY = "chaos"
CREDENTIALS = (("authorization", f"Bearer {KEY}"),)

REQUESTS = {
    f"/tei.v1.{service.name}/{method.name}": getattr(tei_pb2, method.input_type.name)
    for service in tei_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
METHODS = list(REQUESTS)
STREAMS = [method for method in METHODS if method.endswith("Stream")]
OPEN_TO_ALL = ["/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]

TEXT_FIELDS = {"inputs", "text", "texts"}

# all that grpc.aio says to who writes to a call that has ended
OVER = (grpc.aio.AioRpcError, grpc.aio.InternalError, grpc.aio.UsageError, asyncio.InvalidStateError)


class Victim:
    """A server's address, and channels that many calls share."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channels = [self.connect() for _ in range(3)]

    def connect(self) -> grpc.aio.Channel:
        # a channel of its own: by default grpc lets channels to one address share their connection
        return grpc.aio.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)])

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()


Attack = Callable[[Victim, random.Random], Awaitable[str]]


def message(rng: random.Random, method: str) -> Any:
    """A request that any model would take, if the method fits it."""
    request = REQUESTS[method]()
    text = " ".join(rng.choices(("hello", "world", "a", "é", "北京", "😀"), k=rng.randrange(1, 30)))
    for field in request.DESCRIPTOR.fields:
        if field.name in ("query", "text", "inputs", "texts"):
            set_text(request, field.name, text)
        elif field.name == "ids":
            request.ids.extend(rng.choices(range(90), k=5))
        elif field.name in ("truncate", "raw_scores", "return_text"):
            setattr(request, field.name, rng.random() < 0.5)
    return request


def fields_of(method: str) -> set[str]:
    return set(REQUESTS[method].DESCRIPTOR.fields_by_name)


def set_text(request: Any, field: str, text: str) -> None:
    """Fill a field that holds one text, or several."""
    if isinstance(getattr(request, field), str):
        setattr(request, field, text)
    else:
        del getattr(request, field)[:]
        getattr(request, field).extend([text] * 2)


async def ask(
    victim: Victim,
    rng: random.Random,
    method: str,
    *messages: bytes,
    patience: float = PATIENCE,
    metadata: Any = CREDENTIALS,
) -> str:
    """Send everything, read everything."""
    channel = rng.choice(victim.channels)
    if len(messages) == 1:  # sent at once, so that no early answer is missed
        call: Any = channel.unary_stream(method)(messages[0], timeout=patience, metadata=metadata)
    else:
        call = channel.stream_stream(method)(timeout=patience, metadata=metadata)
    with suppress(*OVER):
        if len(messages) != 1:
            for raw in messages:
                await call.write(raw)
            await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    return await verdict(call)


async def verdict(call: Any) -> str:
    """The name of the status; errors that only a bug gives are spelled out."""
    code, text = await call.code(), await call.details() or ""
    if text.startswith("Internal error from Core"):  # grpc.aio's client: the answer came while it was still sending
        return "gone"
    return f"{code.name}: {text}" if is_bug(code.name, text) else code.name


def is_bug(code: str, text: str = "") -> bool:
    """UNKNOWN is an exception that escaped, an id stands for one that was caught, a passed deadline for a hang."""
    return code in ("UNKNOWN", "DATA_LOSS") or "Internal error, id" in text


async def be_polite(victim: Victim, rng: random.Random) -> str:
    method = rng.choice(METHODS)
    return await ask(victim, rng, method, message(rng, method).SerializeToString())


async def send_random_bytes(victim: Victim, rng: random.Random) -> str:
    messages = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]
    return await ask(victim, rng, rng.choice(METHODS + OPEN_TO_ALL), *messages)


async def damage_a_message(victim: Victim, rng: random.Random) -> str:
    method = rng.choice(METHODS)
    raw = bytearray(message(rng, method).SerializeToString() or b"\0")
    for _ in range(rng.randrange(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return await ask(victim, rng, method, bytes(raw[: rng.randrange(len(raw) + 1)]))


async def send_nothing(victim: Victim, rng: random.Random) -> str:
    return await ask(victim, rng, rng.choice(METHODS))


async def send_to_the_wrong_method(victim: Victim, rng: random.Random) -> str:
    one, other = rng.sample(METHODS, 2)
    return await ask(victim, rng, one, message(rng, other).SerializeToString())


async def call_what_is_not_there(victim: Victim, rng: random.Random) -> str:
    path = rng.choice(["/tei.v1.Embed/embed", "/tei.v2.Embed/Embed", "/", "//", "/x" * 500, "/tei.v1.Embed/Embed/"])
    return await ask(victim, rng, path, b"\x0a\x01a")


async def name_an_unknown_enum(victim: Victim, rng: random.Random) -> str:
    method = rng.choice([name for name in METHODS if "truncation_direction" in fields_of(name)])
    request = message(rng, method)
    request.truncation_direction = rng.choice([2, -1, 2**31 - 1, -(2**31)])
    return await ask(victim, rng, method, request.SerializeToString())


async def bring_a_wrong_key(victim: Victim, rng: random.Random) -> str:
    value = rng.choice(["", "Bearer", f"bearer {KEY}", f"Bearer  {KEY}", KEY, "Bearer " + "x" * 4000])
    return await ask(victim, rng, rng.choice(METHODS), b"\xff", metadata=(("authorization", value),))


async def send_large_metadata(victim: Victim, rng: random.Random) -> str:
    return await ask(victim, rng, rng.choice(METHODS), b"", metadata=(*CREDENTIALS, ("x-much", "x" * 100_000)))


async def be_impatient(victim: Victim, rng: random.Random) -> str:
    method = rng.choice(METHODS)
    outcome = await ask(victim, rng, method, message(rng, method).SerializeToString(), patience=0.001)
    return "gone" if outcome == "DEADLINE_EXCEEDED" else outcome


async def send_too_much(victim: Victim, rng: random.Random) -> str:
    return await ask(victim, rng, rng.choice(METHODS), bytes(5 * MEGABYTE))


async def repeat_one_letter(victim: Victim, rng: random.Random) -> str:
    """A megabyte of it, or two in two texts."""
    method = rng.choice([name for name in METHODS if TEXT_FIELDS & fields_of(name)])
    request = message(rng, method)
    (field,) = TEXT_FIELDS & fields_of(method)
    letter = rng.choice("a \0北")
    set_text(request, field, letter * (MEGABYTE // len(letter.encode())))
    return await ask(victim, rng, method, request.SerializeToString())


async def cancel_in_the_middle(victim: Victim, rng: random.Random) -> str:
    method = rng.choice(STREAMS)
    call = rng.choice(victim.channels).stream_stream(method)(timeout=PATIENCE, metadata=CREDENTIALS)
    with suppress(*OVER):
        for _ in range(rng.randrange(1, 20)):
            await call.write(message(rng, method).SerializeToString())
        if rng.random() < 0.5 and method != "/tei.v1.Rerank/RerankStream":  # which answers after the half-close only
            await call.read()
    call.cancel()
    return "gone" if (outcome := await verdict(call)) == "CANCELLED" else outcome


async def leave_a_stream_half_open(victim: Victim, rng: random.Random) -> str:
    """Say nothing more for a while, then close the connection without a goodbye to the call."""
    method = rng.choice(STREAMS)
    channel = victim.connect()
    call = channel.stream_stream(method)(timeout=PATIENCE, metadata=CREDENTIALS)
    with suppress(*OVER, asyncio.CancelledError):
        await call.write(message(rng, method).SerializeToString())
        await asyncio.sleep(rng.random() / 2)
    await channel.close()
    return "gone"


async def never_read(victim: Victim, rng: random.Random) -> str:
    """Send until flow control says stop, or a little longer."""
    channel = victim.connect()
    call = channel.stream_stream("/tei.v1.Embed/EmbedAllStream")(timeout=PATIENCE, metadata=CREDENTIALS)
    raw = message(rng, "/tei.v1.Embed/EmbedAllStream").SerializeToString()
    with suppress(*OVER, asyncio.CancelledError, TimeoutError):
        async with asyncio.timeout(0.2):
            for _ in range(500):
                await call.write(raw)
    await channel.close()
    return "gone"


async def vanish(victim: Victim, rng: random.Random) -> str:
    """A connection by hand that breaks off in the middle of something, politely (FIN) or not (RST)."""
    talk = PREFACE + frame(SETTINGS)
    for stream in range(1, 2 * rng.randrange(1, 4), 2):
        talk += frame(HEADERS, header_block(rng.choice(METHODS), KEY), END_HEADERS, stream)
        talk += frame(DATA, struct.pack(">BI", 0, 1000) + rng.randbytes(rng.randrange(1000)), 0, stream)
    return await shout(victim, rng, talk[: rng.randrange(len(talk))])


async def talk_nonsense(victim: Victim, rng: random.Random) -> str:
    http1 = b"POST /tei.v1.Embed/Embed HTTP/1.1\r\nHost: x\r\n\r\n"
    frames = b"".join(
        frame(rng.randrange(12), flags=rng.randrange(256), stream=rng.randrange(9), payload=rng.randbytes(9))
        for _ in range(5)
    )
    return await shout(victim, rng, rng.choice([http1, rng.randbytes(500), PREFACE + frames, b""]))


async def shout(victim: Victim, rng: random.Random, raw: bytes) -> str:
    host, port = victim.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(ConnectionError):
        writer.write(raw)
        await writer.drain()
        if rng.random() < 0.5:
            async with asyncio.timeout(1):
                await reader.read(100)
    if rng.random() < 0.5:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    return "gone"


# how often, against each other
ATTACKS: dict[Attack, int] = {
    be_polite: 20,
    send_random_bytes: 12,
    damage_a_message: 10,
    send_nothing: 5,
    send_to_the_wrong_method: 5,
    call_what_is_not_there: 3,
    name_an_unknown_enum: 5,
    bring_a_wrong_key: 6,
    send_large_metadata: 1,
    be_impatient: 12,
    send_too_much: 1,
    repeat_one_letter: 2,
    cancel_in_the_middle: 10,
    leave_a_stream_half_open: 2,
    never_read: 1,
    vanish: 5,
    talk_nonsense: 5,
}
