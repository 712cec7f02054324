"""How this process uses its CPU cores: how many there really are, and how torch's threads share them."""

import ctypes
import math
import os
import sys
from pathlib import Path

QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))

# Read by libgomp, torch and oneDNN when they are loaded.
ENVIRONMENT = {
    # A thread that waits for another spins for some microseconds only, then it sleeps: where cores are shared with an
    # event loop, tokenizer threads or other processes, spinning keeps away just the thread that is waited for, while to
    # sleep at once makes each of a small batch's hundred short products wait for a thread to wake up.
    "GOMP_SPINCOUNT": "3000",
    # A batch is tokenized on the thread that asks for it: there are threads for many.
    "TOKENIZERS_PARALLELISM": "false",
    # Kernels that are kept, about a megabyte each, in two caches; 1024 by default.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


# A thread that waits for the interpreter asks for it after so many seconds. The device's thread asks after every
# kernel, while the event loop may work on: by default for 5 ms, in which several kernels could have run.
SWITCH_SECONDS = 0.00003

# glibc's M_ARENA_MAX: heaps that threads allocate from, by default up to eight for each core. What a thread frees stays
# in its heap; in one heap, what one of them has freed the others use.
M_ARENA_MAX = -8
HEAPS = 1


def tune_process() -> None:
    """Set SWITCH_SECONDS, and ENVIRONMENT and HEAPS unless the user has. To be called before torch is imported.

    Threads that have allocated already may keep a heap of their own, so it is best called first of all.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.setswitchinterval(SWITCH_SECONDS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # which macOS and musl lack
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, HEAPS)


def give_memory_back() -> None:
    """Hand what this process has freed back to the system, where glibc would keep it for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # which macOS and musl lack
    if trim is not None:
        trim(0)


def available() -> int:
    """Cores that the scheduler lets this process run on, at most the cgroup's quota (version 2 or 1), rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = next((found for file in QUOTAS if (found := read_quota(file)) is not None), None)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def read_quota(file: Path) -> float | None:
    """The cores that a cgroup grants, None where it sets no limit.

    cpu.max holds "QUOTA PERIOD" in microseconds, or "max PERIOD"; cpu.cfs_quota_us holds QUOTA, -1 without a limit.
    """
    try:
        quota, *period = file.read_text().split()
        period = period or file.with_name("cpu.cfs_period_us").read_text().split()
        cores = int(quota) / int(period[0])
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None
