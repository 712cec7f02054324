import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tei_grpc import cpus


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("nonsense", None), ("", None), ("5 0", None)]
)
def test_quota_of_version_2_is_read(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpus.read_quota(tmp_path / "cpu.max") == cores


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2.0), ("-1", None)])
def test_quota_of_version_1_is_read(tmp_path: Path, quota: str, cores: float | None) -> None:
    (tmp_path / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    assert cpus.read_quota(tmp_path / "cpu.cfs_quota_us") == cores


def test_quota_below_the_core_count_wins_and_is_rounded_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000")
    monkeypatch.setattr(cpus, "QUOTAS", (tmp_path / "missing", tmp_path / "cpu.max"))
    assert cpus.available() == 1


def test_without_a_quota_the_scheduler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "QUOTAS", ())
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: {1, 5, 7})
    assert cpus.available() == 3


def test_process_is_tuned_unless_the_user_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    cpus.tune_process()
    assert (os.environ["GOMP_SPINCOUNT"], os.environ["LRU_CACHE_CAPACITY"]) == ("7", "64")
    assert sys.getswitchinterval() == pytest.approx(cpus.SWITCH_SECONDS)


HEAPS = """
import ctypes, sys, threading
from tei_grpc import cpus
if sys.argv[1] == "tuned":
    cpus.tune_process()
libc, met = ctypes.CDLL(None), threading.Barrier(4)
libc.fdopen.restype = ctypes.c_void_p

def allocate():
    met.wait()
    libc.malloc(100_000)
    met.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="malloc is not glibc's")
@pytest.mark.parametrize("how", ["tuned", "as it is"])
def test_threads_of_a_tuned_process_share_one_heap(how: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    run = subprocess.run(
        [sys.executable, "-c", HEAPS, how], capture_output=True, env=environment, check=True, text=True
    )
    assert (run.stdout.count("<heap nr=") == 1) is (how == "tuned")
