"""What loading a checkpoint raises, whatever is wrong with it."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError, is_failure, reason_of

logger = logging.getLogger(__name__)


@contextmanager
def library_errors(text: str) -> Iterator[None]:
    """Raises StartupError, which says `text` and the reason, in place of whatever a library raises or panics with."""
    try:
        yield
    except StartupError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise StartupError(f"{text}: {reason_of(error)}") from error


@contextmanager
def loading_errors(config: EngineConfig) -> Iterator[None]:
    """Raises StartupError in place of whatever loading raises."""
    try:
        yield
    except (StartupError, asyncio.CancelledError):
        raise
    except BaseException as error:  # a file holds what nobody thought of
        if not is_failure(error):
            raise
        logger.debug("loading failed", exc_info=error)
        text = f"`{config.model_id}` cannot be loaded: {type(error).__name__}: {reason_of(error)}"
        raise StartupError(text) from error
