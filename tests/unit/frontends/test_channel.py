import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tei_grpc.frontends.channel import Channel
from tei_grpc.frontends.messages import Admit, Answered, Granted, Release
from tests.grpc.conftest import until


class End:
    """One end of a channel, what it has received, and the files that came along."""

    def __init__(self, sock):
        self.messages, self.files, self.is_ended = [], [], False
        self.channel = Channel(sock, self.receive, self.end)

    def receive(self, message):
        self.messages.append(message)
        if isinstance(message, Answered):
            words = np.empty(message.words, np.int32)
            self.channel.read_file(words.data)
            self.files.append(words)

    def end(self):
        self.is_ended = True


@pytest.fixture
async def ends():
    pair = [End(each) for each in socket.socketpair()]
    yield pair
    for each in pair:
        each.channel.close()


def answer(id, words):
    return Answered(id, len(words), 1, 0, 0, 1, True)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files():
    return len(os.listdir("/proc/self/fd"))


async def test_messages_arrive_in_order_both_ways(ends):
    left, right = ends
    sent = [Admit(id, False) for id in range(20_000)]  # more than a socket holds
    for message in sent:
        left.channel.send(message)
        right.channel.send(Granted(message.id, 0))
    await until(lambda: len(right.messages) == len(left.messages) == len(sent))
    assert right.messages == sent
    assert left.messages == [Granted(id, 0) for id in range(len(sent))]


async def test_files_go_with_their_messages_and_are_closed(ends):
    left, right = ends
    before = open_files()
    arrays = [np.full(size, size, np.int32) for size in (1, 1_000_000, 2, 100_000)] * 5
    for id, words in enumerate(arrays):
        left.channel.send(Release(id))
        left.channel.send(answer(id, words), words.data)
        left.channel.send(Release(id))
    await until(lambda: len(right.files) == len(arrays))
    assert all(np.array_equal(*each) for each in zip(right.files, arrays, strict=True))
    assert [each for each in right.messages if isinstance(each, Release)] == [
        Release(id) for id in range(len(arrays)) for _ in range(2)
    ]
    assert open_files() == before


async def test_end_is_told_once_after_all_that_was_sent(ends):
    left, right = ends
    for id in range(3):
        left.channel.send(Admit(id, True))
    left.channel.close()
    await until(lambda: right.is_ended)
    assert right.messages == [Admit(id, True) for id in range(3)]
    right.channel.send(Release(0))  # into the void
    await asyncio.sleep(0)
    assert not left.is_ended


async def test_files_that_nobody_has_read_are_closed_with_the_channel():
    ours, theirs = socket.socketpair()
    before = open_files()
    left = End(ours)
    words = np.ones(10, np.int32)
    for id in range(5):
        left.channel.send(answer(id, words), words.data)
    left.channel.close()
    theirs.close()
    assert open_files() == before - 2


async def test_channel_without_file_descriptors_ends_instead_of_losing_an_answer(ends):
    left, right = ends
    words = np.ones(10, np.int32)
    left.channel.send(answer(0, words), words.data)
    left.channel._write()
    with no_descriptor_left():
        right.channel._read()
    assert right.is_ended
    assert right.messages == []


async def test_channel_that_fails_while_it_is_closed_is_closed_once(ends):
    left, _ = ends
    words = np.ones(10, np.int32)
    left.channel.send(answer(0, words), words.data)
    with no_descriptor_left():
        left.channel.close()
    assert left.is_ended


async def test_file_that_cannot_be_made_ends_the_channel(ends):
    left, right = ends
    words = np.ones(10, np.int32)
    left.channel.send(answer(0, words), words.data)
    with no_descriptor_left():
        left.channel._write()
    assert left.is_ended
    await until(lambda: right.is_ended)
