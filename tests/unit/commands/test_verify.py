"""`tei-grpc verify` passes where this server agrees with the reference, and fails loudly where it does not."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tei_grpc import cli
from tei_grpc.commands.verify.texts import TEXTS
from tests.checkpoints import make_checkpoint
from tests.models.architectures import edit_config, make_architecture

MakeCheckpoint = Callable[[str], Path]

SPLADE = ("--pooling", "splade")
LAST_BIAS = "encoder.layer.1.output.dense.bias"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """The folder of a row of tests/checkpoints.py."""

    @cache
    def make(name: str) -> Path:
        return make_checkpoint(name, tmp_path_factory.mktemp(f"verify-{name}"))

    return make


@pytest.fixture
def changed(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A copy of `bert-mean` that the test may change."""
    return Path(shutil.copytree(checkpoint("bert-mean"), tmp_path / "changed"))


def verify(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, object]]:
    """The exit code and what --json says."""
    code = cli.main(["verify", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "options", "task"),
    [
        ("bert-mean", (), "embed"),
        ("bert-cls", (), "embed"),
        ("roberta", (), "embed"),
        ("qwen3", (), "embed"),
        ("bert-mean", ("--force-generic",), "embed"),
        ("bert-mean", ("--dtype", "bfloat16"), "embed"),
        ("bert-one-label", (), "rerank"),
        ("distilbert-three-labels", (), "predict"),
        ("bert-three-labels", ("--dtype", "bfloat16"), "predict"),
        ("bert-masked-lm", SPLADE, "embed sparse"),
    ],
)
def test_tiny_checkpoint_agrees_with_the_reference(
    checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str], name: str, options: tuple[str, ...], task: str
) -> None:
    code, found = verify(capsys, checkpoint(name), *options)
    assert found["failures"] == []
    assert code == 0
    assert found["task"] == task
    assert found["equal_token_ids"] == found["texts"] > 20
    assert found["ours"]["path"] == ("generic" if "--force-generic" in options else "packed")


def test_minilm_agrees_with_sentence_transformers(minilm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, minilm_dir)
    assert code == 0
    assert found["max_difference"] <= 1e-6
    assert found["reference"]["pooling"] == "mean"


def test_real_splade_model_agrees_with_the_formula(splade_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, splade_dir, *SPLADE)
    assert code == 0
    assert found["cosine_min"] >= 0.999999


def test_model_on_the_generic_path_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, make_architecture("albert", tmp_path))
    assert code == 0
    assert found["ours"]["path"] == "generic"


def test_checkpoint_without_modules_is_pooled_as_the_server_pools_it(
    changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (changed / "modules.json").unlink()
    shutil.rmtree(changed / "1_Pooling")
    code, found = verify(capsys, changed, "--pooling", "last-token")
    assert code == 0
    assert found["reference"]["pooling"] == "lasttoken"


def test_one_changed_bias_is_found(
    checkpoint: MakeCheckpoint, changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(changed / "model.safetensors")
    tensors[LAST_BIAS][0] += 0.01
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    code, found = verify(capsys, changed, "--reference", checkpoint("bert-mean"))
    assert code == 1
    assert found["failures"] == ["largest difference"]


def test_wrong_pooling_is_found_and_shown(checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(checkpoint("bert-mean")), "--pooling", "cls"]) == 1
    *rows, verdict = capsys.readouterr().out.splitlines()
    assert ["pooling", "cls", "mean"] in [row.split() for row in rows]
    assert verdict == "FAIL: largest difference, cosine"


def test_another_tokenizer_is_found(
    checkpoint: MakeCheckpoint, changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = json.loads((changed / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, found = verify(capsys, changed, "--reference", checkpoint("bert-mean"))
    assert code == 1
    assert "token ids" in found["failures"]
    assert 0 < found["equal_token_ids"] < found["texts"]


def test_swapped_scores_are_found(
    checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(checkpoint("bert-one-label"), tmp_path / "swapped"))
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.weight"] *= -1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, found = verify(capsys, folder, "--reference", checkpoint("bert-one-label"))
    assert code == 1
    assert found["order_equal"] is False
    assert "order of scores" in found["failures"]


def test_texts_come_from_a_file(checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").write_text("hello world\n\nhello 北京\n")
    code, found = verify(capsys, checkpoint("bert-mean"), "--texts", tmp_path / "texts")
    assert (code, found["texts"]) == (0, 2)


def test_histogram_is_a_png(checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = verify(capsys, checkpoint("bert-mean"), "--histogram", tmp_path / "differences.png")
    assert code == 0
    assert (tmp_path / "differences.png").read_bytes().startswith(b"\x89PNG")


def impossible(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a comparison that cannot be made, and return what it says."""
    assert cli.main(["verify", *map(str, argv)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_histogram_without_matplotlib_names_the_extra(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = impossible(capsys, checkpoint("bert-mean"), "--histogram", "differences.png")
    assert "pip install 'tei-grpc[verify]'" in said


def test_missing_reference_library_names_the_extra(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert "pip install 'tei-grpc[verify]'" in impossible(capsys, checkpoint("bert-mean"))


def test_reference_that_needs_code_of_the_publisher_is_never_run(
    checkpoint: MakeCheckpoint, changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = changed / "marker"
    (changed / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    edit_config(changed, model_type="own", auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"})
    said = impossible(capsys, checkpoint("bert-mean"), "--reference", changed)
    assert "the reference cannot run" in said
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff"])
def test_file_without_texts_is_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "texts").write_bytes(content)
    assert "`--texts`" in impossible(capsys, checkpoint("bert-mean"), "--texts", tmp_path / "texts")


def test_missing_model_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no directory" in impossible(capsys, "/nonesuch")


def test_wrong_usage_has_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "model", "--pooling", "average"])
    assert ended.value.code == 2


def test_progress_is_for_terminals_only(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["verify", str(checkpoint("bert-mean"))])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    cli.main(["verify", str(checkpoint("bert-mean"))])
    assert "this server: 1/" in (shown := capsys.readouterr().err)
    assert shown.endswith("\r\x1b[K")


def test_texts_cover_one_word_and_more_than_a_model_takes(minilm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    lengths = [len(encoding) for encoding in map(tokenizer.encode, TEXTS)]
    assert np.min(lengths) == 3
    assert np.max(lengths) > 512
