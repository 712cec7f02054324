"""The calls under way: who they are, and how they are cut when the server may wait no longer."""

import asyncio


class RunningCalls:
    """Tasks of the calls that handlers are working on: `with calls: ...` has the current one among them meanwhile."""

    def __init__(self) -> None:
        self.are_cut = False
        self.begun = 0  # so far
        self._tasks: set[asyncio.Task[object] | None] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __enter__(self) -> None:
        self.begun += 1
        self._tasks.add(asyncio.current_task())

    def __exit__(self, *_: object) -> None:
        self._tasks.discard(asyncio.current_task())

    def cut(self) -> None:
        """Cancel every call; each ends with UNAVAILABLE."""
        self.are_cut = True
        for task in self._tasks:
            if task is not None:
                task.cancel()
