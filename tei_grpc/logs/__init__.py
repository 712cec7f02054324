"""Log set-up: one line per record to stdout, for people or as JSON.

A record's `extra` fields become fields of the line. `extra={"span": {...}}` describes the request a line belongs to.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Final, TextIO

from tei_grpc.logs.event import Event
from tei_grpc.logs.formatters import Fields, HumanFormatter, JsonFormatter, timestamp
from tei_grpc.logs.handler import BurstHandler

__all__ = ["Event", "configure", "defer", "parse_levels", "timestamp"]

LEVELS: Final[Mapping[str, int]] = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}


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


def configure(level: str, *, json_output: bool, disable_spans: bool, stream: TextIO | None = None) -> None:
    """Send all records to stdout (or `stream`); replaces what was configured before."""
    formatter = JsonFormatter(with_spans=not disable_spans) if json_output else HumanFormatter()
    handler = BurstHandler(stream or sys.stdout, formatter)
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


def defer(event: Event, make_span: Callable[[], Fields]) -> None:
    """Log an event that its logger is enabled for: late, and without a record, if only our own handler would see it."""
    handlers = logging.root.handlers
    if len(handlers) == 1 and isinstance(handlers[0], BurstHandler) and _is_plain(event.logger):
        handlers[0].defer(event, make_span)
    else:
        event.logger.handle(event.record(make_span()))


def _is_plain(logger: logging.Logger | None) -> bool:
    """Whether nobody has put handlers or filters between a logger and the root."""
    while logger is not None and logger is not logging.root:
        if logger.handlers or logger.filters or not logger.propagate:
            return False
        logger = logger.parent
    return True


def _is_news(record: logging.LogRecord) -> bool:
    """False for what grpc reports, with a traceback, when a caller has left just as its answer was being sent."""
    return "ExecuteBatchError" not in record.getMessage()
