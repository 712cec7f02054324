"""The two forms of a line: for people, and JSON."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from json.encoder import encode_basestring as quote
from typing import Any, Final

Fields = Mapping[str, object]

ESCAPED: Final = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}  # control characters
_STANDARD: Final = {*vars(logging.makeLogRecord({})), "message", "asctime"}


class LineFormatter(logging.Formatter, ABC):
    """Formats records; or, for what is logged again and again, only what differs between its lines."""

    @abstractmethod
    def heading(self, record: logging.LogRecord) -> str:
        """Return what is the same in all lines of one place in the code: level, message, logger, file and line."""

    @abstractmethod
    def compose(self, seconds: float, heading: str, span: Fields) -> str:
        """Return what `format` would for a record of that heading, time (seconds since 1970) and span."""


class JsonFormatter(LineFormatter):
    """One JSON object per record."""

    def __init__(self, *, with_spans: bool) -> None:
        super().__init__()
        self._with_spans = with_spans
        self._encode = json.JSONEncoder(default=str, ensure_ascii=False).encode

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's fields, flat; a span also in the list `spans`, where log pipelines look for it."""
        fields = _extra(record)
        span = fields.pop("span", None)
        fields |= {"timestamp": timestamp(record.created), **_heading(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self._add_span(self._encode(fields), span)

    def heading(self, record: logging.LogRecord) -> str:
        """Return the fields of an object, without its braces."""
        return self._encode(_heading(record))[1:-1]

    def compose(self, seconds: float, heading: str, span: Fields) -> str:
        """Return the object of a heading, time and span."""
        return self._add_span(f'{{"timestamp": "{timestamp(seconds)}", {heading}}}', span)

    def _add_span(self, line: str, span: Fields | None) -> str:
        if span is None or not self._with_spans:
            return line
        text = self._encode_span(span)  # once for both places: most lines have one
        return f'{line[:-1]}, "span": {text}, "spans": [{text}]}}'

    def _encode_span(self, span: Fields) -> str:
        """As `_encode`, in half the time: a span has few fields, most of them texts."""
        return f"{{{', '.join([f'{quote(key)}: {self._encode_value(value)}' for key, value in span.items()])}}}"

    def _encode_value(self, value: object) -> str:
        if isinstance(value, str):
            return quote(value)
        return str(value) if type(value) is int else self._encode(value)


class HumanFormatter(LineFormatter):
    """`TIME LEVEL target file:line: message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback below it where there is one."""
        extra = _extra(record)
        span = extra.pop("span", None) or {}
        line = self.compose(record.created, self.heading(record), span, extra)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    def heading(self, record: logging.LogRecord) -> str:
        """Return what is between the time and the fields."""
        return "{level:>5} {target} {filename}:{line_number}: {message}".format_map(_heading(record))

    def compose(self, seconds: float, heading: str, *parts: Fields) -> str:
        """Return the line of a heading, time and fields."""
        fields = "".join([f" {key}={value}" for part in parts for key, value in part.items()])
        return _on_one_line(f"{timestamp(seconds)} {heading}{fields}")


def timestamp(seconds: float) -> str:
    """Return seconds since 1970 as `2026-11-30T12:00:00.123456Z`."""
    whole = int(seconds)
    return f"{_whole_second(whole)}.{int((seconds - whole) * 1e6):06d}Z"


@lru_cache(maxsize=2)
def _whole_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _on_one_line(text: str) -> str:
    """A caller's text cannot fake a line."""
    return text if text.isprintable() else text.translate(ESCAPED)


def _heading(record: logging.LogRecord) -> dict[str, object]:
    return {
        "level": "WARN" if record.levelno == logging.WARNING else record.levelname,
        "message": record.getMessage(),
        "target": record.name,
        "filename": record.filename,
        "line_number": record.lineno,
    }


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
