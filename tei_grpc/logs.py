"""Log set-up: one line per record to stdout, for people or as JSON.

A record's `extra` fields become fields of the line. `extra={"span": {...}}` describes the request a line belongs to.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, TextIO

LEVELS: Final[Mapping[str, int]] = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
BURST_SECONDS: Final = 0.05  # a line of a request waits so long at most
_STANDARD: Final = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def parse_levels(text: str) -> dict[str, int]:
    """Read `info` or `info,tei_grpc.engine=debug` into levels by logger name, "" being all others.

    A text that cannot be read means `info`; without a level of their own, other loggers report errors only.
    """
    levels = {"": logging.ERROR}
    for directive in text.lower().split(","):
        target, _, level = directive.rpartition("=")
        if level.strip() not in LEVELS:
            return {"": logging.INFO}
        levels[target.strip()] = LEVELS[level.strip()]
    return levels


ESCAPED: Final = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}  # control characters


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, *, with_spans: bool) -> None:
        super().__init__()
        self._with_spans = with_spans
        self._encode = json.JSONEncoder(default=str, ensure_ascii=False).encode

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's fields, flat; a span also in the list `spans`, where log pipelines look for it."""
        fields = _extra(record)
        span = fields.pop("span", None)
        fields |= {
            "timestamp": timestamp(record.created),
            "level": "WARN" if record.levelno == logging.WARNING else record.levelname,
            "message": record.getMessage(),
            "target": record.name,
            "filename": record.filename,
            "line_number": record.lineno,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        line = self._encode(fields)
        if span is None or not self._with_spans:
            return line
        text = self._encode(span)  # once for both places: most lines have one
        return f'{line[:-1]}, "span": {text}, "spans": [{text}]}}'


class HumanFormatter(logging.Formatter):
    """`TIME LEVEL target file:line: message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback below it where there is one."""
        extra = _extra(record)
        span = extra.pop("span", None) or {}
        level = "WARN" if record.levelno == logging.WARNING else record.levelname
        where = f"{timestamp(record.created)} {level:>5} {record.name} {record.filename}:{record.lineno}:"
        fields = "".join([f" {key}={value}" for part in (span, extra) for key, value in part.items()])
        line = f"{where} {record.getMessage()}{fields}".translate(ESCAPED)  # a caller's text cannot fake a line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class BurstHandler(logging.Handler):
    """Writes lines in order: those of requests that went well in bursts, all others, and what waits, at once.

    A write lets go of the interpreter's lock, and to get it back takes a request longer than all else about its line.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: list[str] = []
        self._is_closed = False
        self._waiting = threading.Event()
        threading.Thread(target=self._write_bursts, name="logs", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; logging holds this handler's lock."""
        try:
            self._lines.append(self.format(record))
            if record.levelno > logging.INFO or "span" not in record.__dict__:
                self.flush()
            elif not self._waiting.is_set():
                self._waiting.set()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Write what waits."""
        with self._guard():
            if self._lines:
                lines, self._lines = self._lines, []
                self._stream.write("\n".join([*lines, ""]))
                self._stream.flush()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._is_closed = True
        self._waiting.set()
        self.flush()
        super().close()

    def _guard(self) -> AbstractContextManager[object]:
        return self.lock or nullcontext()

    def _write_bursts(self) -> None:
        while self._waiting.wait() and not self._is_closed:
            time.sleep(BURST_SECONDS)
            self._waiting.clear()
            with suppress(OSError, ValueError):  # nobody reads any more; the next line that is no burst's will say so
                self.flush()


def timestamp(seconds: float) -> str:
    """Return seconds since 1970 as `2026-11-30T12:00:00.123456Z`."""
    whole = int(seconds)
    return f"{_whole_second(whole)}.{int((seconds - whole) * 1e6):06d}Z"


@lru_cache(maxsize=2)
def _whole_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _is_news(record: logging.LogRecord) -> bool:
    """False for what grpc reports, with a traceback, when a caller has left just as its answer was being sent."""
    return "ExecuteBatchError" not in record.getMessage()


def configure(level: str, *, json_output: bool, disable_spans: bool, stream: TextIO | None = None) -> None:
    """Send all records to stdout (or `stream`); replaces what was configured before."""
    handler = BurstHandler(stream or sys.stdout)
    handler.setFormatter(JsonFormatter(with_spans=not disable_spans) if json_output else HumanFormatter())
    root = logging.getLogger()
    for replaced in root.handlers:
        if isinstance(replaced, BurstHandler):
            replaced.close()
    root.handlers[:] = [handler]
    for name, number in parse_levels(level).items():
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
    # nobody reads these, and each record would pay for them
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
