"""Every benchmark runs, at the smallest size, and leaves its table, its JSON and its plot. No time is judged."""

import importlib
import json
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint

OPTIONS = {
    "limit": ("--dtype", "float32"),
    "engine": ("--dtype", "float32"),
    "overhead": ("--callers", "2"),
    "serve": (
        "--dtype",
        "float32",
        "--callers",
        "2",
        "--loads",
        "0.5",
        "--server-options",
        "--max-batch-tokens",
        "256",
    ),
    "compare": ("--dtype", "float32", "--subjects", "ours"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers."""
    return make_checkpoint("bert-mean", tmp_path_factory.mktemp("benchmarks"))


@pytest.mark.parametrize("name", OPTIONS)
def test_benchmark_runs_and_leaves_its_results(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--short", "--texts", "2", "--rounds", "1", "--workloads", "P")
    benchmark = importlib.import_module(f"benchmarks.{name}")
    benchmark.main(["--model", str(model), "--output", str(tmp_path), *size, *OPTIONS[name]])
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result["rows"]
    assert all(row["value"] > 0 for row in result["rows"] if not row["subject"].startswith("left"))
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert all(row["subject"] in table for row in result["rows"])


def test_cpu_time_is_named_in_the_result(model: Path, tmp_path: Path) -> None:
    limit = importlib.import_module("benchmarks.limit")
    size = ("--texts", "1", "--rounds", "1", "--dtype", "float32", "--workloads", "Q")
    limit.main(["--model", str(model), "--output", str(tmp_path), "--cpu-time", *size])
    assert json.loads((tmp_path / "limit.json").read_text())["clock"] == "CPU time"
