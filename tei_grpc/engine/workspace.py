"""Memory that a batch takes on a CPU besides the weights: a formula, what batches really took, and what there is."""

import logging
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tei_grpc.loading.files import read_value
from tei_grpc.loading.model_config import CONFIG, ModelConfig
from tei_grpc.types import Pooling

logger = logging.getLogger(__name__)

MIB: Final = 1 << 20
FIXED: Final = 96 * MIB  # blocks of scores and their masks, tables of angles, kernels kept for each of three threads
VOCABULARY: Final = 160 * MIB  # logits of two chunks in float32, and of one in 16 bits
HOLES: Final = 1.5  # glibc leaves holes between tensors of different sizes, half as much as the tensors themselves
LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class Workspace(NamedTuple):
    """What a batch takes: `per_token` and `fixed` bytes."""

    per_token: int
    fixed: int

    def bytes(self, tokens: int) -> int:
        """Of a batch of so many tokens."""
        return self.per_token * tokens + self.fixed


def workspace(model: ModelConfig, hidden: int, dtype: str) -> Workspace:
    """The most that a batch of a packed model takes on a CPU; docs/operations.md derives it. `hidden`: its hidden size.

    What a config does not name as most do is taken for what is usual.
    """
    size = partial(read_value, model.hf_config, kind=int, file=CONFIG)
    heads = size("num_attention_heads") or 1
    query = heads * (size("head_dim") or hidden // heads)
    key = query * (size("num_key_value_heads") or heads) // heads
    intermediate = size("intermediate_size") or size("hidden_dim") or 4 * hidden
    values = max(3 * hidden + 4 * query + 5 * key, 5 * hidden + 3 * intermediate)
    number_bytes = 4 if dtype == "float32" else 2
    fixed = FIXED + (VOCABULARY if Pooling.SPLADE in model.pooling else 0)
    return Workspace(int(HOLES * number_bytes * values), fixed)


class Watch:
    """Sees how much memory this process takes from now on."""

    def __init__(self) -> None:
        self.before = _status("RssAnon")  # None where the system does not tell
        with suppress(OSError):  # else the peak of loading stands in, which is more
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def peak(self) -> int:
        """Bytes that were needed at once since then, besides what there was; memory that files back does not count."""
        most, files = _status("VmHWM"), _status("RssFile")
        if most is None or files is None or self.before is None:
            return 0
        return max(0, most - files - self.before)


def report(workspace: Workspace, watch: Watch, *, tried: int, most: int) -> None:
    """Say what batches of up to `tried` tokens took, and what one of `most` may; warn where there is too little."""
    if watch.before is None:
        return
    took, allowed, needed = watch.peak, workspace.bytes(tried), workspace.bytes(most)
    level = logging.WARNING if took > allowed else logging.INFO
    text = "batches of up to %d tokens took %d MiB of the %d MiB that they may; one of %d, the largest, may take %d MiB"
    logger.log(level, text, tried, took // MIB, allowed // MIB, most, needed // MIB)
    if watch.before + needed > (limit := limit_bytes()):
        logger.warning(
            "the model and its largest batch may take %d MiB, and there are %d MiB: "
            "allow for more, or lower `--max-batch-tokens` (MAX_BATCH_TOKENS)",
            (watch.before + needed) // MIB,
            limit // MIB,
        )


def limit_bytes(files: tuple[Path, ...] = LIMITS) -> int:
    """What this process may have: the limit of its cgroup (version 2 or 1), or all that the machine has."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in files:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found = min(found, int(file.read_text()))
    return found


def _status(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
