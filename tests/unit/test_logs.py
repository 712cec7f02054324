"""Log lines: levels, JSON and human form."""

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
from datetime import datetime
from functools import partial

import pytest

from tei_grpc import logs
from tei_grpc.logs.formatters import HumanFormatter, JsonFormatter, LineFormatter
from tei_grpc.logs.handler import MAX_LINES
from tei_grpc.types import Kind

pytestmark = pytest.mark.usefixtures("restored_logging")


def start(level: str = "info", *, json_output: bool = True, disable_spans: bool = False) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level, json_output=json_output, disable_spans=disable_spans, stream=stream)
    return stream


def test_json_line_has_the_fields_that_pipelines_for_tei_read() -> None:
    stream = start()
    logging.getLogger("tei_test.engine").info("Success", extra={"compute_tokens": 7})
    fields = json.loads(stream.getvalue())
    assert datetime.fromisoformat(fields.pop("timestamp")).tzinfo is not None
    assert isinstance(fields.pop("line_number"), int)
    assert fields == {
        "level": "INFO",
        "message": "Success",
        "target": "tei_test.engine",
        "filename": "test_logs.py",
        "compute_tokens": 7,
    }


def test_warning_is_called_warn_in_json() -> None:
    stream = start()
    logging.getLogger("tei_test").warning("careful")
    assert json.loads(stream.getvalue())["level"] == "WARN"


def test_span_is_shown_alone_and_in_the_list_of_spans() -> None:
    stream = start()
    logging.getLogger("tei_test").info("Success", extra={"span": {"name": "embed"}})
    flush()
    fields = json.loads(stream.getvalue())
    assert (fields["span"], fields["spans"]) == ({"name": "embed"}, [{"name": "embed"}])


def flush() -> None:
    logging.getLogger().handlers[0].flush()


def test_span_is_written_as_the_json_module_would() -> None:
    stream = start()
    span = {
        '"é\n': 'x"\\\n\x1b',
        "kind": Kind.EMBED,
        "n": 7,
        "yes": True,
        "none": None,
        "half": 0.5,
        "list": [1, {"a": 2}],
    }
    logging.getLogger("tei_test").info("Success", extra={"span": span})
    assert f'"span": {json.dumps(span, ensure_ascii=False)}, ' in stream.getvalue()


def test_spans_can_be_left_out_of_json() -> None:
    stream = start(disable_spans=True)
    logging.getLogger("tei_test").info("Success", extra={"span": {"name": "embed"}})
    flush()
    assert json.loads(stream.getvalue())["message"] == "Success"
    assert "span" not in stream.getvalue()


def test_exception_stays_on_the_json_line() -> None:
    stream = start()
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("tei_test").exception("failed")
    assert len(stream.getvalue().splitlines()) == 1
    assert "ValueError: inner" in json.loads(stream.getvalue())["exception"]


def test_value_that_json_does_not_know_is_shown_as_text() -> None:
    stream = start()
    logging.getLogger("tei_test").info("x", extra={"where": {1}})
    assert json.loads(stream.getvalue())["where"] == "{1}"


def test_human_line_has_level_target_place_and_fields() -> None:
    stream = start(json_output=False)
    logging.getLogger("tei_test").info("Success", extra={"compute_tokens": 7})
    assert " INFO tei_test test_logs.py:" in stream.getvalue()
    assert stream.getvalue().endswith(": Success compute_tokens=7\n")


def test_human_line_shows_the_fields_of_a_span() -> None:
    stream = start(json_output=False)
    logging.getLogger("tei_test").info("Success", extra={"span": {"name": "embed", "compute_tokens": 7}})
    flush()
    assert stream.getvalue().endswith(": Success name=embed compute_tokens=7\n")


@pytest.mark.parametrize("json_output", [True, False])
def test_text_of_a_caller_cannot_begin_a_line(json_output: bool) -> None:
    stream = start(json_output=json_output)
    logging.getLogger("tei_test").info("refused %s", "a\nINFO forged")
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("info", {"": logging.INFO}),
        ("WARN", {"": logging.WARNING}),
        ("trace", {"": logging.DEBUG}),
        ("info,tei_grpc.engine=debug", {"": logging.INFO, "tei_grpc.engine": logging.DEBUG}),
        ("tei_grpc=debug", {"": logging.ERROR, "tei_grpc": logging.DEBUG}),
        ("info, tei_grpc = error", {"": logging.INFO, "tei_grpc": logging.ERROR}),
        ("loud", {"": logging.INFO}),
        ("warn,tei_grpc=loud", {"": logging.INFO}),
        ("", {"": logging.INFO}),
    ],
)
def test_log_level_forms(text: str, levels: dict[str, int]) -> None:
    assert logs.parse_levels(text) == levels


def test_off_silences_everything() -> None:
    stream = start("off")
    logging.getLogger("tei_test").critical("x")
    assert stream.getvalue() == ""


def test_module_has_a_level_of_its_own() -> None:
    stream = start("info,tei_test.engine=debug")
    logging.getLogger("tei_test.engine").debug("shown")
    logging.getLogger("tei_test.other").debug("hidden")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["shown"]


def test_configuring_again_replaces_the_first_output() -> None:
    first, second = start(), start()
    logging.getLogger("tei_test").info("x")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


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


def test_time_is_utc_with_microseconds() -> None:
    assert logs.timestamp(1767225599.25) == "2025-12-31T23:59:59.250000Z"
