"""A process's log that goes to memory."""

import io
import logging

from tei_grpc import logs


def start(level: str = "info", *, json_output: bool = True, disable_spans: bool = False) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level, json_output=json_output, disable_spans=disable_spans, stream=stream)
    return stream


def flush() -> None:
    logging.getLogger().handlers[0].flush()
