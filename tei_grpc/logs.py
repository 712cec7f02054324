"""Log set-up: one line per record to stdout, for people or as JSON.

A record's `extra` fields become fields of the line. `extra={"span": {...}}` describes the request a line belongs to.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, TextIO

LEVELS: Final[Mapping[str, int]] = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
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


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, *, with_spans: bool) -> None:
        super().__init__()
        self._with_spans = with_spans

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's fields, flat; a span also in the list `spans`, where log pipelines look for it."""
        fields = _extra(record)
        span = fields.pop("span", None)
        fields |= _base(record)
        if span is not None and self._with_spans:
            fields |= {"span": span, "spans": [span]}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """`TIME LEVEL target file:line: message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback below it where there is one."""
        base, extra = _base(record), _extra(record)
        if isinstance(span := extra.pop("span", None), dict):
            extra = span | extra
        where = f"{base['timestamp']} {record.levelname:>7} {record.name} {record.filename}:{record.lineno}:"
        fields = "".join(f" {key}={value}" for key, value in extra.items())
        line = f"{where} {base['message']}{fields}".replace("\n", "\\n")  # a caller's text cannot fake a line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(level: str, *, json_output: bool, disable_spans: bool, stream: TextIO | None = None) -> None:
    """Send all records to stdout (or `stream`); replaces what was configured before."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonFormatter(with_spans=not disable_spans) if json_output else HumanFormatter())
    logging.getLogger().handlers[:] = [handler]
    for name, number in parse_levels(level).items():
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)


def _base(record: logging.LogRecord) -> dict[str, object]:
    return {
        "timestamp": datetime.fromtimestamp(record.created, UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z"),
        "level": "WARN" if record.levelno == logging.WARNING else record.levelname,
        "message": record.getMessage(),
        "target": record.name,
        "filename": record.filename,
        "line_number": record.lineno,
    }


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
