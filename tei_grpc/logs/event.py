"""What is logged again and again: of its lines only the time and the span differ."""

import logging
from types import CodeType
from typing import Final

from tei_grpc.logs.formatters import Fields


class Event:
    """A message at info. It is a constant of a module: the part that all its lines share is formatted once."""

    def __init__(self, logger: logging.Logger, message: str, place: CodeType) -> None:
        """Take the function that logs it as `place`."""
        self.logger: Final = logger
        self._message = message
        self._place = place

    def record(self, span: Fields) -> logging.LogRecord:
        """What `logger.info(message, extra={"span": span})` would make at the top of that function."""
        file, line, function = self._place.co_filename, self._place.co_firstlineno, self._place.co_name
        return self.logger.makeRecord(
            self.logger.name, logging.INFO, file, line, self._message, (), None, func=function, extra={"span": span}
        )
