"""How far something long has come: a line that changes on a terminal, lines in the log elsewhere."""

import io
import logging
import sys
import time
from typing import Any

logger = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds; what takes less is not talked about
STEPS = 4  # lines in the log
MB = 1e6


class Progress:
    """Counts up to `total` of whatever `advance` is told."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, max(1, total)
        self._done = 0
        self._said = 0
        self._on_terminal = sys.stderr.isatty()
        self._talks_from = time.monotonic() + (0 if self._on_terminal else PATIENCE)

    def advance(self, amount: int) -> None:
        """Come `amount` further."""
        self._done += amount
        percent = 100 * self._done // self._total
        step = percent if self._on_terminal else STEPS * percent // 100
        if step == self._said or time.monotonic() < self._talks_from:
            return
        self._said = step
        if self._on_terminal:
            print(f"\r{self._what}: {percent} %", end="\n" if percent == 100 else "", file=sys.stderr, flush=True)
        else:
            logger.info("%s: %d %%", self._what, percent)


def download_bars() -> Any:
    """Return what huggingface_hub shall show downloads with: on a terminal its own bars (None), else our lines."""
    if sys.stderr.isatty():
        return None
    from tqdm import tqdm  # not huggingface_hub's, which can be switched off for a whole process

    started = time.monotonic()

    class Lines(tqdm):  # type: ignore[misc]  # tqdm has no types
        """A bar that writes to the log, once in PATIENCE seconds."""

        said_at = 0.0

        def __init__(self, *args: Any, **keywords: Any) -> None:
            keywords.pop("name", None)  # an argument of huggingface_hub's bars
            super().__init__(*args, **{**keywords, "disable": False, "file": io.StringIO()})

        def display(self, *_args: object, **_keywords: object) -> None:
            """Called by tqdm, several times a second."""
            now = time.monotonic()
            if self.unit == "B" and self.total and now - (self.said_at or started) >= PATIENCE:
                self.said_at = now
                logger.info("Downloading: %.0f of %.0f MB", self.n / MB, self.total / MB)

    return Lines
