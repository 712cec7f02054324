"""How far a command has come, for people at a terminal."""

import sys
from types import TracebackType
from typing import Self


class Progress:
    """One line on stderr, rewritten at each step and removed at the end; nothing when stderr is no terminal."""

    def __init__(self, title: str, steps: int) -> None:
        self._title = title
        self._steps = steps
        self._done = 0

    def __enter__(self) -> Self:
        self._write(f"{self._title}: loading")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("")

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        self._write(f"{self._title}: {self._done}/{self._steps}")

    def _write(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
