"""How much of streams may be under way."""

import asyncio

import pytest

from tei_grpc.rpc import room as rooms_module
from tei_grpc.rpc.room import Room, Rooms


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Rooms:
    """A hundred bytes for all streams, eight messages for each."""
    monkeypatch.setattr(rooms_module, "ALL_BYTES", 100)
    monkeypatch.setattr(rooms_module, "LEAST_BYTES", 0)
    return Rooms(window=8)


async def fill(room: Room, size: int = 1) -> int:
    """The bytes that a stream gets, in messages of `size`, before it has to wait."""
    taken = 0
    while True:
        try:
            async with asyncio.timeout(0):
                await room.take(size)
        except TimeoutError:
            return taken
        taken += size


async def waiting(room: Room, size: int) -> asyncio.Task[None]:
    task = asyncio.create_task(room.take(size))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_message_that_would_not_fit_waits_until_an_earlier_reply_has_left(rooms: Rooms) -> None:
    room = Room(rooms)
    await room.take(40)
    second = await waiting(room, 40)
    room.give(40)
    await asyncio.wait_for(second, 5)


async def test_message_that_would_not_fit_waits_until_an_earlier_reply_is_there_and_smaller(rooms: Rooms) -> None:
    room = Room(rooms)
    await room.take(40)
    second = await waiting(room, 40)
    room.settle(40, 10)
    await asyncio.wait_for(second, 5)


async def test_one_message_is_always_under_way_however_large_and_whatever_others_hold(rooms: Rooms) -> None:
    await Room(rooms).take(10**12)
    await asyncio.wait_for(Room(rooms).take(10**12), 5)


async def test_window_bounds_the_messages() -> None:
    room = Room(Rooms(window=1))
    await room.wait()
    second = asyncio.create_task(room.wait())
    await asyncio.sleep(0)
    assert not second.done()
    room.give(0)
    await asyncio.wait_for(second, 5)


async def test_stream_that_nobody_reads_takes_half_of_what_is_free(rooms: Rooms) -> None:
    assert [await fill(Room(rooms)) for _ in range(4)] == [50, 25, 13, 6]


@pytest.mark.parametrize("streams", [2, 4, 9])
async def test_streams_that_fill_together_get_equal_shares_and_leave_one_for_the_next(
    rooms: Rooms, streams: int
) -> None:
    all_rooms = [Room(rooms) for _ in range(streams)]
    tasks = [asyncio.create_task(take_bytes(room)) for room in all_rooms]
    for _ in range(200):
        await asyncio.sleep(0)
    taken = []
    for task in tasks:
        task.cancel()
        taken.append(await task)
    assert taken == pytest.approx([100 / (streams + 1)] * streams, abs=1)
    assert rooms.free == 100 - sum(taken)


async def take_bytes(room: Room) -> int:
    """One after the other, until it is cancelled."""
    taken = 0
    try:
        while True:
            await room.take(1)
            taken += 1
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        return taken


async def test_each_stream_may_hold_a_little_whatever_others_hold(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms_module, "LEAST_BYTES", 10)
    await Room(rooms).take(1000)
    assert await fill(Room(rooms)) == 10


@pytest.mark.parametrize("how", ["reply leaves", "reply is smaller", "stream ends"])
async def test_stream_goes_on_when_another_holds_less(rooms: Rooms, how: str) -> None:
    other, room = Room(rooms), Room(rooms)
    await other.take(80)
    await room.take(10)
    second = await waiting(room, 10)
    if how == "reply leaves":
        other.give(80)
    elif how == "reply is smaller":
        other.settle(80, 10)
    else:
        other.__exit__()
    await asyncio.wait_for(second, 5)


async def test_stream_that_needs_less_goes_on_before_one_that_needs_more(rooms: Rooms) -> None:
    other, first, second = Room(rooms), Room(rooms), Room(rooms)
    await other.take(40)
    await other.take(20)
    await first.take(15)
    await second.take(1)
    most, least = await waiting(first, 70), await waiting(second, 40)
    other.give(20)
    await asyncio.wait_for(least, 5)
    assert not most.done()
    other.__exit__()
    second.__exit__()
    await asyncio.wait_for(most, 5)


async def test_stream_that_has_left_while_it_waited_is_forgotten(rooms: Rooms) -> None:
    room = Room(rooms)
    await room.take(60)
    second = await waiting(room, 60)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    room.__exit__()
    assert rooms.free == 100
    assert await fill(Room(rooms)) == 50
