"""Files in memory that a server and its front-ends have open; they are gone with the last process that has."""

import mmap
import os
from typing import NamedTuple

from tei_grpc.metrics import MEMORY_BYTES, Memory


class SharedFiles(NamedTuple):
    """File descriptors, the same in all processes."""

    slots: int  # see `slots`
    metrics: int  # MEMORY_BYTES for each front-end


def make_files() -> SharedFiles:
    """Make them, empty."""
    return SharedFiles(os.memfd_create("tei-slots"), os.memfd_create("tei-metrics"))


def map_metrics(file: int, frontends: int) -> list[Memory]:
    """Return the memory of every front-end's numbers, as doubles. They outlive a front-end that is started anew."""
    size = frontends * MEMORY_BYTES
    os.ftruncate(file, size)
    memory = memoryview(mmap.mmap(file, size))
    return [memory[start : start + MEMORY_BYTES].cast("d") for start in range(0, size, MEMORY_BYTES)]
