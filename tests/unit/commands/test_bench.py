"""`tei-grpc bench` measures, and its advice follows from what it measured."""

import json
from pathlib import Path

import pytest

from tei_grpc import cli
from tei_grpc.commands.bench.advice import advise_budget, advise_dtype, advise_workers
from tei_grpc.commands.bench.subject import Speed
from tests.checkpoints import make_checkpoint


def speed(dtype: str, *rates: float) -> Speed:
    budgets = [512 << step for step in range(len(rates))]
    return Speed(dtype, dict(zip(budgets, rates, strict=True)), dict.fromkeys(budgets, 0.25), 0.001)


@pytest.mark.parametrize(("rates", "budget"), [((96, 100), "512"), ((94, 100), "1024"), ((100, 90, 104), "512")])
def test_budget_is_the_smallest_within_five_per_cent_of_the_best(rates: tuple[float, ...], budget: str) -> None:
    advice = advise_budget(speed("float32", *rates))
    assert advice.value == budget
    assert "up to 250 ms" in advice.reason


@pytest.mark.parametrize(("rate", "dtype"), [(109, "float32"), (160, "bfloat16")])
def test_dtype_that_rounds_more_must_be_worth_it(rate: float, dtype: str) -> None:
    advice, chosen = advise_dtype("model", [speed("float32", 100), speed("bfloat16", rate)])
    assert (advice.value, chosen.dtype) == (dtype, dtype)


@pytest.mark.parametrize(("rate", "tokenizing", "workers"), [(100, 0.001, "1"), (2500, 0.001, "3")])
def test_tokenizer_threads_keep_up_with_the_model(rate: float, tokenizing: float, workers: str) -> None:
    assert advise_workers(rate, tokenizing).value == workers


def test_no_dtype_is_asked_for_and_every_text_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, texts = make_checkpoint("bert-mean", tmp_path / "model"), tmp_path / "texts"
    texts.write_text("hello world\nquery\n\nhello\n")
    assert cli.main(["bench", str(folder), "--texts", str(texts), "--seconds", "0.01", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["texts"], result["tokens"]) == (3, 4 + 3 + 3)
    assert {"float32", "bfloat16"} <= set(result["dtypes"])
    assert set(result["suggested"]) == {"--dtype", "--max-batch-tokens", "--tokenization-workers"}
    assert all(rate > 0 for rate in result["dtypes"]["float32"]["texts_per_second"].values())


@pytest.mark.parametrize("name", ["bert-one-label", "bert-three-labels"])
def test_table_shows_speeds_and_flags(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(name, tmp_path)
    assert cli.main(["bench", str(folder), "--dtype", "float32", "--seconds", "0.001"]) == 0
    table = capsys.readouterr().out
    assert "512 texts of" in table
    assert "--max-batch-tokens" in table
