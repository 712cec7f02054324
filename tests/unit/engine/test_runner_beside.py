"""Batches that run side by side on a real, tiny model: how large they may be, what they answer, who waits for whom."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tei_grpc import cpus
from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import pack
from tei_grpc.engine.queue import ANY, Demand, Size
from tei_grpc.engine.runner import LEAST_BESIDE, Runner
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Batch, Entry, Kind
from tests.checkpoints import bert_t

BUDGET = 2048


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_t(tmp_path_factory.mktemp("bert"))


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, cores: int = 2) -> Runner:
    monkeypatch.setattr(cpus, "available", lambda: cores)
    config = EngineConfig(model_id=str(folder))
    return Runner(read_model_config(folder, config), config)


def batch(first: int, *lengths: int) -> Batch:
    ids = [np.arange(first + row, first + row + length, dtype=np.int32) % 80 + 5 for row, length in enumerate(lengths)]
    return pack([Entry(row, Kind.EMBED_ALL, text) for row, text in enumerate(ids)])


@contextmanager
def one_half_at_work(runner: Runner, tokens: int = 1) -> Iterator[list[Future[str]]]:
    """While the block runs."""
    may_end = threading.Event()

    def work(_: Batch) -> str:
        assert may_end.wait(10)
        return "ended"

    try:
        yield runner._shards.start(work, [batch(0, tokens)])
    finally:
        may_end.set()
        runner._shards.wait(0)


def values(answers: object) -> list[bytes]:
    return [array.tobytes() for (array,) in answers]


def test_batches_that_run_at_the_same_time_answer_bit_by_bit_what_each_answers_alone(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, batches = load(bert, monkeypatch), [batch(0, *range(3, 35)), batch(7, *[30] * 11)]
    with one_half_at_work(runner):
        alone = [values(runner.launch(each).collect()) for each in batches]
    met, answer = threading.Barrier(2, timeout=10), runner._answer
    monkeypatch.setattr(runner, "_answer", lambda shard: (met.wait(), answer(shard))[1])
    for _ in range(5):
        with one_half_at_work(runner):
            started = [runner.launch(each) for each in batches]
        assert [values(each.collect()) for each in started] == alone


@pytest.mark.parametrize(
    ("waiting", "most", "share"),
    [
        (0, BUDGET, ANY),
        (2 * LEAST_BESIDE - 1, BUDGET, ANY),
        (2 * LEAST_BESIDE, BUDGET // 2, LEAST_BESIDE),
        (700, BUDGET // 2, 350),
        (3 * BUDGET, BUDGET // 2, 3 * BUDGET // 2),
    ],
)
def test_batch_of_an_idle_device_has_what_waits_or_half_where_that_is_enough_for_both_threads(
    bert: Path, monkeypatch: pytest.MonkeyPatch, waiting: int, most: int, share: int
) -> None:
    runner = load(bert, monkeypatch)
    assert (runner.size(Demand(waiting, 9, BUDGET)), runner.ahead) == (Size(1, most, ANY, share), 0)


@pytest.mark.parametrize(
    ("waiting", "first", "busy"),
    [
        (0, 0, 2),
        (LEAST_BESIDE - 1, 9, 2),
        (LEAST_BESIDE, 9, 1),
        (3000, BUDGET // 2, 1),
        (3000, BUDGET // 2 + 1, 2),  # it could not start beside the batch
    ],
)
def test_batch_leaves_the_other_thread_to_what_waits(
    bert: Path, monkeypatch: pytest.MonkeyPatch, waiting: int, first: int, busy: int
) -> None:
    runner, found = load(bert, monkeypatch), []
    start = runner._shards.start
    monkeypatch.setattr(runner._shards, "start", lambda work, shards: found.append(len(shards)) or start(work, shards))
    runner.launch(batch(0, *[30] * 8), Demand(waiting, first, BUDGET)).collect()
    assert found == [busy]


def test_text_longer_than_half_of_the_budget_has_all_cores(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(bert, monkeypatch)
    monkeypatch.setattr(runner._shards, "start", lambda work, shards: pytest.fail("one thread has it"))
    runner.launch(batch(0, 33), Demand(3000, 9, 64)).collect()


@pytest.mark.parametrize(
    ("under_way", "budget", "least", "most"),
    [
        (300, BUDGET, LEAST_BESIDE, BUDGET // 2),
        (BUDGET // 2, BUDGET, LEAST_BESIDE, BUDGET // 2),
        (1400, BUDGET, LEAST_BESIDE, BUDGET - 1400),
        (1900, BUDGET, BUDGET - 1900, BUDGET - 1900),
        (100, 2 * LEAST_BESIDE - 2, LEAST_BESIDE - 1, LEAST_BESIDE - 1),
    ],
)
def test_two_batches_have_no_more_tokens_than_one_may(
    bert: Path, monkeypatch: pytest.MonkeyPatch, under_way: int, budget: int, least: int, most: int
) -> None:
    runner = load(bert, monkeypatch)
    with one_half_at_work(runner, tokens=under_way):
        assert runner.size(Demand(3 * BUDGET, 9, budget)) == Size(least, most, most, 3 * BUDGET // 2)


@pytest.mark.parametrize(("waiting", "share"), [(0, LEAST_BESIDE), (300, LEAST_BESIDE), (600, 300)])
def test_batch_beside_another_one_has_half_of_what_waits(
    bert: Path, monkeypatch: pytest.MonkeyPatch, waiting: int, share: int
) -> None:
    runner = load(bert, monkeypatch)
    with one_half_at_work(runner, tokens=300):
        assert runner.size(Demand(waiting, 9, BUDGET)) == Size(LEAST_BESIDE, BUDGET // 2, BUDGET // 2, share)


@pytest.mark.parametrize("cores", [1, 3])
def test_batches_run_one_after_the_other_where_cores_cannot_be_halved(
    bert: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    runner = load(bert, monkeypatch, cores)
    started = runner.launch(batch(0, *[30] * 11))
    assert started.is_done()
    assert runner.size(Demand(3 * BUDGET, 9, BUDGET)) == Size(1, BUDGET, ANY)
    assert (runner.ahead, runner.wait_for_room(0)) == (0, True)
    assert [array.shape for (array,) in started.collect()] == [(30, 32)] * 11


@pytest.mark.parametrize("does", ["check", "run again"])
def test_what_all_cores_run_waits_until_nothing_else_runs(
    bert: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """Behind a check a failed batch is tried again, in halves that may be large; float32 takes twice the memory."""
    runner, waits, found = load(bert, monkeypatch), threading.Event(), []
    wait, compute = runner._shards.wait, runner._compute
    monkeypatch.setattr(runner._shards, "wait", lambda most: (waits.set(), wait(most))[1])
    monkeypatch.setattr(runner, "_compute", lambda *args, **plain: found.append(busy()) or compute(*args, **plain))

    def busy() -> int:
        return runner._shards.busy

    with ThreadPoolExecutor(1) as device:
        with one_half_at_work(runner):
            entry = batch(0, 9).entries[0]
            done = device.submit(runner.check) if does == "check" else device.submit(runner._run_again, entry)
            assert waits.wait(10)
        done.result(10)
    assert found == [0]
