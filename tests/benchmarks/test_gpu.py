"""The benchmark of a CUDA device: that it runs, dry, what it computes by itself, and that it refuses to pretend."""

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.measurements import in_turns
from tei_grpc.engine.flight import Started


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert "no CUDA device" in found.err


def test_dry_run_prints_a_line_for_each_subject(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--seconds", "0.001", "--parts", "speed,latency,idle,cosine"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "no number means anything" in head
    for subject in ("matrix products", "ours", "sentence-transformers", "transformers, SDPA"):
        assert any(subject in line for line in lines)
    assert sum("mixed lengths" in line for line in lines) == 3
    assert any("not measured: needs a CUDA device" in line for line in lines)


@pytest.mark.parametrize(
    ("intervals", "idle"),
    [
        ([(0, 10)], 0),
        ([(0, 4), (6, 10)], 0.2),
        ([(6, 10), (0, 4), (1, 3)], 0.2),
        ([(0, 5), (3, 8), (8, 10)], 0),
        ([(2, 3), (2, 7), (9, 12)], 0.2),
    ],
)
def test_idle_share_is_the_time_that_no_kernel_covers(intervals: list[tuple[float, float]], idle: float) -> None:
    assert gpu.idle_share(intervals) == pytest.approx(idle)


def test_workloads_are_four_batches_of_texts_that_the_model_takes() -> None:
    for lengths in gpu.workloads(4096).values():
        assert 4 * 4096 - 512 < sum(lengths) <= 4 * 4096
        assert 8 <= min(lengths) <= max(lengths) <= 512


def test_batches_keep_to_their_tokens_and_lose_no_text() -> None:
    texts = gpu.ids_of([300, 500, 20, 400, 512, 7])
    batches = gpu.batches_of(texts, 1024)
    assert all(len(batch.input_ids) <= 1024 for batch in batches)
    assert np.concatenate([sorted(len(entry) for entry in batch.entries) for batch in batches]).sum() == 1739


def test_batches_are_started_before_the_one_before_is_awaited() -> None:
    log = []

    class Runner:
        def launch(self, batch):
            log.append(f"launch {batch}")
            return Started(lambda: log.append(f"collect {batch}"), lambda: True)

    gpu.run_ahead(Runner(), [1, 2, 3])
    assert log == ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]


def test_all_are_measured_in_every_round() -> None:
    times, order = iter([3, 10, 1, 30, 2, 20]), []

    def measure(run: object) -> float:
        order.append(run)
        return next(times)

    assert in_turns({"a": "run a", "b": "run b"}, measure, 3) == {"a": 2, "b": 20}
    assert order == ["run a", "run b"] * 3
