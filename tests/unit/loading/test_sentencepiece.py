"""A SentencePiece model gives the ids of transformers, which makes the tokenizer of it."""

import shutil
import sys
from pathlib import Path

import pytest

from tei_grpc.engine.tokenizer import load
from tei_grpc.errors import StartupError
from tests.folders import write_json
from tests.unit.loading.texts import TEXTS, assert_equal_ids


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model, learned from the texts."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS * 3 for line in text.splitlines() if "\x00" not in line]),
        model_prefix=str(folder / "pieces"),
        vocab_size=400,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "pieces.model"


@pytest.mark.parametrize(
    ("model_type", "name", "tokenizer_class"),
    [
        ("xlm-roberta", "sentencepiece.bpe.model", "XLMRobertaTokenizer"),
        ("deberta-v2", "spm.model", "DebertaV2Tokenizer"),
        ("t5", "spiece.model", "T5Tokenizer"),
    ],
)
def test_sentencepiece_model_gives_the_ids_of_transformers(tmp_path, pieces, model_type, name, tokenizer_class):
    shutil.copy(pieces, tmp_path / name)
    write_json(tmp_path / "config.json", {"model_type": model_type})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": tokenizer_class})
    assert_equal_ids(tmp_path)


def test_sentencepiece_without_transformers_says_how_to_make_the_file(tmp_path, pieces, monkeypatch):
    shutil.copy(pieces, tmp_path / "sentencepiece.bpe.model")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        StartupError, match=r"`tokenizer.json` not found .*`sentencepiece.bpe.model`.*\[generic\].*save_"
    ):
        load(tmp_path, {"model_type": "xlm-roberta"})


def test_damaged_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"no model")
    write_json(tmp_path / "config.json", {"model_type": "xlm-roberta"})
    with pytest.raises(StartupError, match=r"cannot make it of `sentencepiece\.bpe\.model`"):
        load(tmp_path, {"model_type": "xlm-roberta"})
