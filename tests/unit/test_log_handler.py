"""How log lines are written: deferred ones in bursts, all in their order, and never at a caller's expense."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from tei_grpc import logs
from tei_grpc.logs.formatters import HumanFormatter, JsonFormatter, LineFormatter
from tei_grpc.logs.handler import MAX_LINES
from tei_grpc.types import Kind
from tests.unit.streams import flush, start

pytestmark = pytest.mark.usefixtures("restored_logging")


class Writes(io.StringIO):
    """Counts writes, and says when there was one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.count += 1
        self.written.set()
        return super().write(text)


LOGGER = logging.getLogger("tei_test")
MORE_THAN_A_PIPE = "x" * 100_000  # takes at once


def defer_lines(count: int) -> None:
    for number in range(count):
        logs.defer(SUCCESS, partial(dict, number=number))


SUCCESS = logs.Event(LOGGER, "Success", defer_lines.__code__)


def start_counting() -> Writes:
    stream = Writes()
    logs.configure("info", json_output=True, disable_spans=False, stream=stream)
    return stream


def messages(text: str) -> list[str]:
    return [json.loads(line)["message"] for line in text.splitlines()]


def test_deferred_lines_are_written_in_bursts_and_soon() -> None:
    stream = start_counting()
    defer_lines(100)
    assert stream.written.wait(10)
    flush()
    assert stream.count < 20
    assert [json.loads(line)["span"]["number"] for line in stream.getvalue().splitlines()] == list(range(100))


def test_any_other_line_is_written_at_once_and_in_its_place() -> None:
    stream = start_counting()
    defer_lines(1)
    LOGGER.warning("careful")
    assert messages(stream.getvalue()) == ["Success", "careful"]


def test_end_of_logging_writes_what_waits() -> None:
    stream = start_counting()
    defer_lines(1)
    logging.getLogger().handlers[0].close()
    assert messages(stream.getvalue()) == ["Success"]


def test_time_of_a_deferred_line_is_that_of_the_event() -> None:
    stream = start_counting()
    before = logs.timestamp(time.time())
    defer_lines(1)
    after = logs.timestamp(time.time())
    assert stream.written.wait(10)
    assert before <= json.loads(stream.getvalue())["timestamp"] <= after < logs.timestamp(time.time())


@pytest.mark.parametrize(
    "span", [{}, {"id": 'é"\\ \n\x1b\ud800', "kind": Kind.EMBED, "count": 7, "yes": True, "where": {1}}]
)
@pytest.mark.parametrize(
    "formatter", [HumanFormatter(), JsonFormatter(with_spans=True), JsonFormatter(with_spans=False)]
)
def test_deferred_line_is_that_of_a_record(formatter: LineFormatter, span: dict[str, object]) -> None:
    record = SUCCESS.record(span)
    assert formatter.compose(record.created, formatter.heading(SUCCESS.record({})), span) == formatter.format(record)


@pytest.mark.parametrize("json_output", [True, False])
def test_deferred_line_is_that_of_a_call_to_the_logger_but_for_time_and_place(json_output: bool) -> None:
    stream = start(json_output=json_output)
    defer_lines(1)
    LOGGER.info("Success", extra={"span": {"number": 0}})
    timeless = [re.sub(r"\S+Z|(py:|line_number\S+ )\d+", "", line) for line in stream.getvalue().splitlines()]
    assert timeless[0] == timeless[1] != ""


@pytest.mark.parametrize("name", ["", "tei_test"])
def test_handler_of_somebody_else_gets_what_could_be_deferred(name: str) -> None:
    start_counting()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        defer_lines(1)
    finally:
        logging.getLogger(name).removeHandler(handler)
    assert [record.getMessage() for record in records] == ["Success"]


def test_crash_loses_no_line_but_deferred_ones_behind_the_last_other() -> None:
    code = (
        "import logging, os, sys; from tei_grpc import logs; logger = logging.getLogger('tei_test'); "
        "logs.configure('info', json_output=True, disable_spans=False); "
        "logs.defer(logs.Event(logger, 'Success', logs.configure.__code__), dict); "
        "logger.error('the end is near'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -9
    assert messages(done.stdout) == ["Success", "the end is near"]


def test_log_on_a_full_disk_holds_nobody_up() -> None:
    code = (
        "import logging, sys; from tei_grpc import logs; "
        "logs.configure('info', json_output=True, disable_spans=False); "
        "any(logging.getLogger('tei_test').error('lost') for _ in range(100)); sys.exit(3)"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 3


class Pipe:
    """Logs to a pipe that nobody reads until the test says so."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self._reader, self._writer = os.fdopen(reader), os.fdopen(writer, "w")
        logs.configure("info", json_output=True, disable_spans=False, stream=self._writer)

    def read_all(self) -> list[str]:
        """Read while the log ends; return all messages."""
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self._reader.read)
            for _ in range(20):  # each waits for a bounded time
                flush()
            self._close()
            return messages(reading.result())

    def close(self) -> None:
        """Stop reading, if that was ever begun."""
        self._close()
        self._reader.close()

    def _close(self) -> None:
        logging.getLogger().handlers[0].close()
        self._writer.close()


@contextmanager
def open_pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    try:
        yield pipe
    finally:
        pipe.close()


def test_log_that_nobody_reads_holds_nobody_up() -> None:
    with open_pipe():
        for number in range(4 * MAX_LINES):
            LOGGER.error("error %d", number)
            defer_lines(1)


def test_log_that_nobody_reads_keeps_the_oldest_lines_and_no_more_than_its_limit() -> None:
    with open_pipe() as pipe:
        for number in range(3 * MAX_LINES):
            LOGGER.error("error %d", number)
        read = pipe.read_all()
        assert read == [f"error {number}" for number in range(len(read))]
        assert MAX_LINES <= len(read) < 2 * MAX_LINES


def test_lines_that_were_left_out_are_counted_in_their_place() -> None:
    with open_pipe() as pipe:
        LOGGER.error(MORE_THAN_A_PIPE)  # until it is read, nothing behind it is taken
        defer_lines(MAX_LINES)
        LOGGER.error("careful")
        room = MAX_LINES // 2
        report = f"{MAX_LINES - room} lines were left out here: nobody read the log"
        assert pipe.read_all() == [MORE_THAN_A_PIPE, *["Success"] * room, report, "careful"]


def test_line_longer_than_a_pipe_takes_at_once_is_whole() -> None:
    with open_pipe() as pipe:
        LOGGER.error(MORE_THAN_A_PIPE)
        assert pipe.read_all() == [MORE_THAN_A_PIPE]
