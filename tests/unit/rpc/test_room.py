"""How many replies of a stream may be under way."""

import asyncio

from tei_grpc.rpc import streams
from tei_grpc.rpc.streams import Room


async def test_reply_that_would_not_fit_waits_until_an_earlier_one_has_left(monkeypatch) -> None:
    monkeypatch.setattr(streams, "REPLY_BYTES", 100)
    room = Room(window=8)
    await room.take(60)
    second = asyncio.create_task(room.take(60))
    await asyncio.sleep(0)
    assert not second.done()
    room.give(60)
    await asyncio.wait_for(second, 5)


async def test_one_reply_is_always_under_way_however_large(monkeypatch) -> None:
    monkeypatch.setattr(streams, "REPLY_BYTES", 100)
    await asyncio.wait_for(Room(window=1).take(10**12), 5)


async def test_window_bounds_the_messages() -> None:
    room = Room(window=1)
    await room.wait()
    second = asyncio.create_task(room.wait())
    await asyncio.sleep(0)
    assert not second.done()
    room.give(0)
    await asyncio.wait_for(second, 5)
