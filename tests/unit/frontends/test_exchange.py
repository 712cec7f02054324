"""Both ends of the seam in one process: what crosses on the way must not leak a permit or mix up answers."""

import asyncio
import os
import socket

import numpy as np
import pytest

from tei_grpc.config import EngineConfig
from tei_grpc.errors import OverloadedError, StartupError, UnavailableError
from tei_grpc.frontends.exchange import Exchange
from tei_grpc.frontends.remote_device import GONE, RemoteDevice
from tei_grpc.loading.hub import Snapshot
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Entry, Failure, Kind, Output
from tests.fakes import FakeDevice, row
from tests.grpc.conftest import until, write_checkpoint

PERMITS = 2


class Side:
    """A front-end's side: its device, and what was delivered to it."""

    def __init__(self, exchange, memory):
        ours, theirs = socket.socketpair()
        self.connection = exchange.connect(ours)
        self.device = RemoteDevice(theirs, memory, PERMITS)
        self.results, self.states = {}, []

    async def start(self):
        return await self.device.start(
            lambda results: self.results.update({each.id: each for each in results}), self.states.append
        )


@pytest.fixture
async def seam(tmp_path):
    """The local device, the exchange, and two front-ends."""
    config = EngineConfig(model_id=str(write_checkpoint(tmp_path, "BertModel")), max_concurrent_requests=PERMITS)
    local = FakeDevice(read_model_config(tmp_path, config), config)
    memory = os.memfd_create("slots")
    exchange = Exchange(memory, PERMITS)
    sides = [Side(exchange, memory) for _ in range(2)]
    exchange.locate(Snapshot(tmp_path, "abc"))
    facts = await local.start(exchange.deliver, exchange.follow)
    exchange.open(local, facts, 512)
    assert [await side.start() for side in sides] == [facts, facts]
    yield local, exchange, *sides
    local.runner.gate.set()
    exchange.close()
    for side in sides:
        await side.device.stop()
    await local.stop()
    os.close(memory)


def entry(id, *ids):
    return Entry(id, Kind.EMBED, np.array(ids, np.int32))


async def test_checkpoint_is_told_as_it_was_found(seam, tmp_path):
    _, _, side, _ = seam
    await until(side.device.checkpoint.done)
    assert side.device.fetch(None) == Snapshot(tmp_path, "abc")


async def test_entries_of_the_same_name_get_the_answers_of_their_own(seam):
    local, _, one, two = seam
    for side, ids in ((one, (1, 2)), (two, (3, 4, 5))):
        await side.device.admit(waits=False)
        side.device.submit(entry(7, *ids))
    await until(lambda: one.results and two.results)
    assert one.results[7].arrays[0].tolist() == row(entry(7, 1, 2)).tolist()
    assert two.results[7].arrays[0].tolist() == row(entry(7, 3, 4, 5)).tolist()
    one.device.release()
    two.device.release()
    await until(lambda: local.free_permits == PERMITS)


async def test_answer_to_a_cancelled_entry_reaches_nobody(seam):
    local, _, one, _ = seam
    local.runner.gate.clear()
    await one.device.admit(waits=False)
    one.device.submit(entry(0, 1))
    await asyncio.to_thread(local.runner.running.wait)
    one.device.cancel(0)
    one.device.submit(entry(1, 9, 9))  # in the same slot
    local.runner.gate.set()
    await until(lambda: one.results)
    assert list(one.results) == [1]
    assert one.results[1].arrays[0].tolist() == row(entry(1, 9, 9)).tolist()


async def test_callers_who_do_not_wait_are_refused_when_no_permit_is_free(seam):
    local, _, one, two = seam
    for side in (one, two):
        await side.device.admit(waits=False)
    with pytest.raises(OverloadedError):
        await one.device.admit(waits=False)
    one.device.release()
    await until(lambda: local.free_permits == 1)
    await two.device.admit(waits=False)


async def test_who_gives_up_waiting_takes_no_permit(seam):
    local, _, one, two = seam
    for _ in range(PERMITS):
        await one.device.admit(waits=False)
    waiting = asyncio.create_task(two.device.admit(waits=True))
    await until(lambda: two.connection._waiting)
    waiting.cancel()
    await until(lambda: not two.connection._waiting)
    for _ in range(PERMITS):
        one.device.release()
    await until(lambda: local.free_permits == PERMITS)


@pytest.mark.parametrize("turns", range(12))
async def test_permit_comes_back_whenever_its_caller_leaves(seam, turns):
    local, _, one, _ = seam
    asking = asyncio.create_task(one.device.admit(waits=False))
    for _ in range(turns):  # of the loop, in which the question goes there, and the answer back
        await asyncio.sleep(0)
    if asking.cancel():
        with pytest.raises(asyncio.CancelledError):
            await asking
    else:
        one.device.release()
    await until(lambda: local.free_permits == PERMITS and not one.device._idle and not one.device._turns)


async def test_all_that_a_lost_front_end_has_comes_back(seam):
    local, exchange, one, two = seam
    local.runner.gate.clear()
    for id in range(PERMITS):
        await one.device.admit(waits=False)
        one.device.submit(entry(id, 1))
    waiting = asyncio.create_task(one.device.admit(waits=True))
    await until(lambda: one.connection._waiting)
    await one.device.stop()
    await until(lambda: local.free_permits == PERMITS)
    assert local.waiting == 0
    assert exchange.tickets == {}
    assert sorted(exchange.free) == list(range(PERMITS))
    await two.device.admit(waits=True)
    waiting.cancel()


async def test_all_who_wait_are_told_when_the_other_side_is_lost(seam):
    local, exchange, one, _ = seam
    local.runner.gate.clear()
    await one.device.admit(waits=False)
    one.device.submit(entry(0, 1))
    waiting = [asyncio.create_task(one.device.admit(waits=waits)) for waits in (True, True)]
    await until(lambda: local.free_permits == 0 or one.connection._waiting)
    exchange.close()
    await until(lambda: 0 in one.results)
    assert isinstance(one.results[0], Failure)
    assert str(one.results[0].error) == GONE
    assert one.states == [False]
    for each in await asyncio.gather(*waiting, return_exceptions=True):
        assert each is None or str(each) == GONE
    with pytest.raises(UnavailableError):
        one.device.submit(entry(1, 1))
    with pytest.raises(UnavailableError):
        one.device.admit(waits=False)
    one.device.release()  # nothing is left to give back


async def test_front_end_that_loads_ends_when_its_server_does():
    ours, theirs = socket.socketpair()
    device = RemoteDevice(theirs, os.memfd_create("slots"), PERMITS)
    ours.close()
    with pytest.raises(StartupError):
        await device.start(lambda results: None, lambda healthy: None)
    with pytest.raises(StartupError):
        device.fetch(None)


async def test_states_of_the_device_are_passed_on_once(seam):
    _, exchange, one, two = seam
    for healthy in (True, False, False, True):
        exchange.follow(healthy)
    await until(lambda: one.states == two.states == [False, True])


async def test_late_front_end_hears_that_the_device_does_not_run(seam):
    _, exchange, one, _ = seam
    exchange.follow(False)
    late = Side(exchange, one.device._memory)
    await until(lambda: not late.device._healthy)
    await late.start()
    assert late.states == [False]
    await late.device.stop()


async def test_entries_are_refused_when_the_local_device_has_ended(seam):
    local, _, one, _ = seam
    await one.device.admit(waits=False)
    await local.stop()
    one.device.submit(entry(0, 1))
    await until(lambda: 0 in one.results)
    assert not isinstance(one.results[0], Output)
