"""The calls under way: who they are, and how they are cut when the server may wait no longer."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RunningCalls:
    """Tasks of the calls that handlers are working on."""

    def __init__(self) -> None:
        self.are_cut = False
        self.begun = 0  # so far
        self._tasks: set[asyncio.Task[object]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the current task as a call while the block runs."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call runs in a task")
        self.begun += 1
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def cut(self) -> None:
        """Cancel every call; each ends with UNAVAILABLE."""
        self.are_cut = True
        for task in self._tasks:
            task.cancel()
