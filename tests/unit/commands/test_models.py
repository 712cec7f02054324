"""`tei-grpc models` says what the registry says."""

import json

import pytest

from tei_grpc import cli
from tei_grpc.models import model_types


def test_every_model_type_of_the_registry_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert sorted({row["model_type"] for row in listed}) == model_types()
    bert = {"model_type": "bert", "family": "Bert", "path": "packed"}
    assert {**bert, "serves": "embedding, classification, reranking, splade"} in listed


def test_table_says_that_other_models_run_on_the_generic_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    head, *rows, note = capsys.readouterr().out.splitlines()
    assert head.split() == ["model_type", "family", "path", "serves"]
    assert "distilbert  " in "\n".join(rows)
    assert "generic path" in note
