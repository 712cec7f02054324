"""Where lines wait until stdout takes them: nobody who logs ever waits for those who read.

Lines of requests that went well are composed and written in bursts by a thread: that is several times cheaper than
one by one between two requests. All others are written at once, after what waits, so that a crash loses none of them.
What the reader of a pipe does not take waits here, and there is a limit to that.
"""

import codecs
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Final, NamedTuple, Protocol, TextIO

from tei_grpc.logs.event import Event
from tei_grpc.logs.formatters import Fields, LineFormatter

BURST_SECONDS: Final = 0.05  # a line of a request waits so long at most
FLUSH_SECONDS: Final = 0.5  # what has not been read so long after the end is lost
MAX_LINES: Final = 8192  # that wait; those of requests that went well have half of the room
LINES_AT_ONCE: Final = 128  # composed between two writes: each lets go of the GIL, which costs more than some lines
PIPE_BUF: Final = select.PIPE_BUF  # bytes that a pipe takes at once and in one piece, if it takes any
LOOK_SECONDS: Final = 1.0  # between two looks at whether the handler was closed


class Output(Protocol):
    """What lines are written to."""

    def is_ready(self, seconds: float) -> bool:
        """Whether PIPE_BUF bytes can be written without waiting, now or so many seconds later."""

    def write(self, data: bytes) -> int:
        """Write up to PIPE_BUF bytes and return how many. Raises OSError."""


class Deferred(NamedTuple):
    """A line that is composed when it is written, as of the time (seconds since 1970) when it was logged."""

    created: float
    event: Event
    make_span: Callable[[], Fields]


class BurstHandler(logging.Handler):
    """Writes lines in order: deferred ones in bursts, all others, and what waits, at once."""

    def __init__(self, stream: TextIO, formatter: LineFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._compose = formatter.compose
        self._heading = cache(lambda event: formatter.heading(event.record({})))
        self._output = _output(stream)
        self._waiting: deque[Deferred | str] = deque()
        self._taken = b""  # from `_waiting`, and not yet written
        self._left_out = 0
        self._is_late = False  # the reader is slower than we are: until it has caught up, only the thread writes
        self._is_closed = False
        self._writing = threading.Lock()
        self._called = threading.Event()
        threading.Thread(target=self._write_bursts, name="logs", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; logging holds this handler's lock."""
        try:
            self._take(self.format(record), MAX_LINES)
            if not self._is_late:
                self._write()
        except Exception:
            self.handleError(record)

    def defer(self, event: Event, make_span: Callable[[], Fields]) -> None:
        """Take what becomes a line of the next burst."""
        self.acquire()
        try:
            self._take(Deferred(time.time(), event, make_span), MAX_LINES // 2)
        finally:
            self.release()

    def flush(self) -> None:
        """Write what waits, as far as it is read within FLUSH_SECONDS."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while not self._write() and (seconds := deadline - time.monotonic()) > 0:
            self._output.is_ready(seconds)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        if not self._is_closed:
            self._is_closed = True
            self._called.set()
            with suppress(OSError):
                self.flush()
        super().close()

    def _take(self, line: Deferred | str, room: int) -> None:
        if len(self._waiting) >= room:
            self._left_out += 1
            return
        if self._left_out:
            self._waiting.append(self._report_left_out())
        self._waiting.append(line)
        if not self._called.is_set():
            self._called.set()

    def _report_left_out(self) -> str:
        text, count = "%d lines were left out here: nobody read the log", self._left_out
        self._left_out = 0
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None))

    def _write_bursts(self) -> None:
        while self._called.wait() and not self._is_closed:
            time.sleep(BURST_SECONDS)
            self._called.clear()
            with suppress(OSError):  # the next line that is no burst's will say so
                while not (self._is_closed or self._write()):
                    self._output.is_ready(LOOK_SECONDS)

    def _write(self) -> bool:
        """Write as long as nobody has to wait for that; say whether nothing is left."""
        with self._writing:
            try:
                while self._fill() and self._output.is_ready(0):
                    end = self._taken.rfind(b"\n", 0, PIPE_BUF) + 1 or PIPE_BUF  # other processes may write, too
                    self._taken = self._taken[self._output.write(self._taken[:end]) :]
            except OSError:  # nobody will read it
                self._taken = b""
                self._waiting.clear()
                raise
            self._is_late = bool(self._taken)
            return not self._is_late

    def _fill(self) -> bool:
        """Take lines if there are fewer than one write takes; False when there are none."""
        if self._waiting and len(self._taken) < PIPE_BUF:
            count = min(len(self._waiting), LINES_AT_ONCE)
            text = "".join([f"{self._line(self._waiting.popleft())}\n" for _ in range(count)])
            self._taken += text.encode("utf-8", "backslashreplace")
        return bool(self._taken)

    def _line(self, line: Deferred | str) -> str:
        if isinstance(line, str):
            return line
        return self._compose(line.created, self._heading(line.event), line.make_span())


class _Descriptor:
    """A file, a pipe, a terminal or a socket."""

    def __init__(self, number: int) -> None:
        self._number = number

    def is_ready(self, seconds: float) -> bool:
        poll = select.poll()  # one object cannot be used by two threads at a time
        poll.register(self._number, select.POLLOUT)
        return bool(poll.poll(1000 * seconds))

    def write(self, data: bytes) -> int:
        return os.write(self._number, data)


class _Stream:
    """What has no descriptor, such as text in memory."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def is_ready(self, seconds: float) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self._stream.write(self._decode(data))
        self._stream.flush()
        return len(data)


def _output(stream: TextIO) -> Output:
    stream.flush()
    try:
        return _Descriptor(stream.fileno())
    except OSError:
        return _Stream(stream)
