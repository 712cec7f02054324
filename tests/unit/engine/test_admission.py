"""Permits, and who waits for them."""

import asyncio

import pytest

from tei_grpc.engine.queue import Admission
from tei_grpc.errors import OverloadedError


async def waiter(admission: Admission, order: list[str], name: str) -> None:
    turn = admission.admit(waits=True)
    if turn is not None:
        await turn
    order.append(name)


async def start(*works) -> list[asyncio.Task[None]]:
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.sleep(0)
    return tasks


async def test_caller_who_does_not_wait_fails_at_once_when_no_permit_is_free():
    admission = Admission(1)
    assert admission.admit(waits=False) is None
    with pytest.raises(OverloadedError, match="Model is overloaded"):
        admission.admit(waits=False)


async def test_permit_given_back_can_be_taken_again():
    admission = Admission(1)
    admission.admit(waits=False)
    admission.release()
    assert admission.admit(waits=False) is None


async def test_waiters_are_served_in_order():
    admission, order = Admission(1), []
    admission.admit(waits=False)
    tasks = await start(*(waiter(admission, order, name) for name in "abc"))
    for _ in tasks:
        admission.release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert order == ["a", "b", "c"]


async def test_waiters_leave_the_last_quarter_to_the_others():
    admission, order = Admission(8), []
    tasks = await start(*(waiter(admission, order, str(i)) for i in range(10)))
    assert order == list("012345")
    assert admission.free == 2
    assert admission.admit(waits=False) is None
    assert admission.admit(waits=False) is None
    with pytest.raises(OverloadedError):
        admission.admit(waits=False)
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("permits", [1, 2, 3, 4, 5, 16])
async def test_waiters_get_on_whatever_the_number_of_permits(permits):
    admission, order = Admission(permits), []

    async def work(name: str) -> None:
        await waiter(admission, order, name)
        await asyncio.sleep(0)
        admission.release()

    await asyncio.wait_for(asyncio.gather(*(work(str(i)) for i in range(40))), 5)
    assert admission.free == permits
    assert len(order) == 40


async def test_release_by_a_caller_who_did_not_wait_wakes_no_waiter_into_the_last_quarter():
    admission, order = Admission(4), []
    for _ in range(4):
        admission.admit(waits=False)
    (task,) = await start(waiter(admission, order, "a"))
    admission.release()
    await asyncio.sleep(0)
    assert order == []
    admission.release()
    await task
    assert order == ["a"]


async def test_cancelled_waiter_is_passed_over():
    admission, order = Admission(1), []
    admission.admit(waits=False)
    first, second = await start(waiter(admission, order, "first"), waiter(admission, order, "second"))
    first.cancel()
    await asyncio.wait([first])
    admission.release()
    await second
    assert order == ["second"]


async def test_waiter_cancelled_after_its_turn_came_hands_the_permit_on():
    admission, order = Admission(1), []
    admission.admit(waits=False)
    first, second = await start(waiter(admission, order, "first"), waiter(admission, order, "second"))
    admission.release()
    first.cancel()
    await second
    assert order == ["second"]
    admission.release()
    assert admission.free == 1


async def test_waiter_cancelled_just_before_a_release_ends_as_cancelled():
    admission, order = Admission(1), []
    admission.admit(waits=False)
    (task,) = await start(waiter(admission, order, "a"))
    task.cancel()
    admission.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert admission.free == 1
