"""The two forms of a line: for people, and JSON."""

import json
import logging
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

ESCAPED: Final = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}  # control characters
_STANDARD: Final = {*vars(logging.makeLogRecord({})), "message", "asctime"}


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
        line = _on_one_line(f"{where} {record.getMessage()}{fields}")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


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


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
