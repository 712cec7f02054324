"""`vocab.txt` gives the ids of transformers, and of the published `tokenizer.json`."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tei_grpc.engine.tokenizer import load
from tei_grpc.errors import StartupError
from tests.folders import write_json
from tests.unit.loading.texts import PAIRS, assert_equal_ids

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
NAMED = {f"{key}_token": text for key, text in SPECIAL.items()}


def word_piece(folder: Path, minilm: Path, config: Mapping[str, object] | None, model_type: str = "bert") -> Path:
    shutil.copy(minilm / "vocab.txt", folder)
    write_json(folder / "config.json", {"model_type": model_type})
    if config is not None:
        write_json(folder / "tokenizer_config.json", config)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"tokenizer_class": "BertTokenizer", **NAMED},
        {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "strip_accents": True},
        {"tokenizer_class": "BertTokenizer", "strip_accents": False, "tokenize_chinese_chars": False},
        {"tokenizer_class": "DistilBertTokenizer"},
        {
            "tokenizer_class": "BertTokenizer",
            "mask_token": {"__type": "AddedToken", "content": "[MASK]", "lstrip": True, "normalized": False},
            "added_tokens_decoder": {
                "30523": {"content": "<second>", "special": False, "normalized": True},
                "30522": {"content": "<|im_start|>", "special": True, "normalized": False},
            },
        },
        {"tokenizer_class": "BertTokenizer", "additional_special_tokens": ["<|im_start|>"]},
    ],
)
def test_vocabulary_of_words_gives_the_ids_of_transformers(tmp_path, minilm_dir, config):
    assert_equal_ids(word_piece(tmp_path, minilm_dir, config))


def test_vocabulary_of_words_equals_the_published_tokenizer(tmp_path, minilm_dir):
    made, published = load(word_piece(tmp_path, minilm_dir, None), {"model_type": "bert"}), load(minilm_dir, {})
    for text, pair in PAIRS:
        assert made.encode(text, pair).ids == published.encode(text, pair).ids
    assert made.decode(made.encode("Hello, unbelievable world").ids) == "hello, unbelievable world"


def test_special_tokens_map_names_the_special_tokens(tmp_path):
    (tmp_path / "vocab.txt").write_text("<pad>\n<unk>\n<first>\n<last>\nhello\n")
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<first>", "sep_token": {"content": "<last>"}}
    write_json(tmp_path / "special_tokens_map.json", names)
    assert load(tmp_path, {"model_type": "bert"}).encode("Hello <last> nothing").ids == [2, 4, 3, 1, 3]


def test_vocabulary_without_its_special_tokens_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("hello\nworld\n[UNK]\n")
    with pytest.raises(StartupError, match=r"vocab\.txt` lacks the special tokens \[CLS\], \[SEP\]"):
        load(tmp_path, {"model_type": "bert"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("do_lower_case", "yes"), ("cls_token", 3), ("added_tokens_decoder", {"first": "a"}), ("tokenizer_class", 3)],
)
def test_nonsense_in_tokenizer_config_is_named(tmp_path, minilm_dir, key, value):
    folder = word_piece(tmp_path, minilm_dir, {"tokenizer_class": "BertTokenizer", key: value})
    with pytest.raises(StartupError, match=r"`tokenizer_config\.json`"):
        load(folder, {})


@pytest.mark.parametrize("content", [b"\xff\xfe\xff", b"[UNK]\n[CLS]\n[SEP]\n\xff"])
def test_vocabulary_that_is_no_text_is_named(tmp_path, content):
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(StartupError, match=r"vocab\.txt` cannot be made into `tokenizer\.json`"):
        load(tmp_path, {"model_type": "bert"})


def test_added_tokens_without_ids_are_refused(tmp_path, minilm_dir):
    folder = word_piece(tmp_path, minilm_dir, None)
    write_json(folder / "added_tokens.json", {"<a>": "one", "<b>": 2})
    with pytest.raises(StartupError, match=r"added_tokens\.json`: `<a>` must be a whole number"):
        load(folder, {"model_type": "bert"})


def test_tokenizer_code_of_the_publisher_is_never_run(tmp_path, minilm_dir):
    auto_map = {"AutoTokenizer": ["tokenization.Mine", None]}
    word_piece(tmp_path, minilm_dir, {"tokenizer_class": "Mine", "auto_map": auto_map}, model_type="unheard")
    (tmp_path / "tokenization.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\nclass Mine: pass\n")
    with pytest.raises(StartupError, match=r"cannot make it of `vocab\.txt`"):
        load(tmp_path, {"model_type": "unheard"})
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer_config.json"])
def test_lfs_pointer_is_named(tmp_path, minilm_dir, name):
    word_piece(tmp_path, minilm_dir, {"tokenizer_class": "BertTokenizer"})
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 134\n")
    with pytest.raises(StartupError, match=rf"{name} is a Git LFS pointer"):
        load(tmp_path, {"model_type": "bert"})
