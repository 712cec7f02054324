"""Token ids equal transformers', whatever files the tokenizer comes as; and what is said when it cannot be made."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from tei_grpc.engine.tokenizer import load
from tei_grpc.engine.words import words_of
from tei_grpc.errors import StartupError
from tests.folders import write_json

TEXTS = (
    "hello world",
    "",
    " ",
    "   two  spaces   and a tail  ",
    "What is Deep Learning?",
    "It's 3.14 o'clock; don't panic - she said: \"no!\"",
    "snake_case, camelCase, kebab-case and e-mail@example.org",
    "https://example.org/a?b=c&d=%20#e",
    "ALL CAPITALS, Mixed Case and ﬁ ligatures ½ ² ℌ",
    "line one\nline two\r\nline three\ttabbed",
    "Café naïve résumé Ångström",
    "Cafe\u0301 written with a combining accent",
    "Straße, İstanbul, ǅ and ς",
    "Привет, мир! Как дела?",
    "Ελληνικά κείμενα με τόνους",
    "שלום עולם, מה שלומך?",
    "שָׁלוֹם with points",
    "مرحبا بالعالم، كيف حالك؟",
    "\u202eright to left\u202c and back \u200f \u200e",
    "北京欢迎你。",
    "東京都の天気は晴れです、カタカナも",
    "안녕하세요 세계",
    "ภาษาไทยไม่มีช่องว่าง",
    "नमस्ते दुनिया",
    "தமிழ் மொழி",
    "Tiếng Việt có dấu",
    "😀 smile 👩🏽‍🚀 astronaut 🇩🇪 flag 👨‍👩‍👧 family",
    "zero\u200bwidth \ufeff mark \u00ad soft hyphen",
    "control \x00 \x01 \x07 \x7f \x85 characters",
    "no-break\u00a0space \u2003 em \u3000 ideographic",
    "\ufffd replacement and \ud7ff the last before surrogates \U0010fffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "1234567890 12,345.67 １２３ ٣٤٥",
    "ＦＵＬＬ width and ｈａｌｆ",
    "[CLS] special [SEP] tokens [MASK] of [PAD] BERT [UNK]",
    "<s> special </s> tokens <mask> of <pad> RoBERTa <unk>",
    "<|endoftext|> and <|im_start|>",
    "x[SEP]y<mask>z </s>",
    "##ing ▁meta Ġspace",
    "The quick brown fox jumps over the lazy dog. " * 4,
)
PAIRS = tuple(zip(TEXTS, (*TEXTS[7:], *TEXTS[:7]), strict=True))
SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
NAMED = {f"{key}_token": text for key, text in SPECIAL.items()}


def assert_equal_ids(folder: Path, config: Mapping[str, object] | None = None) -> None:
    """Ours give the ids, and for pairs the types, that transformers' tokenizer gives, text by text."""
    ours, theirs = load(folder, config or {}), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
    for text, pair in PAIRS:
        encoding, expected = ours.encode(text, pair), theirs([(text, pair)], return_token_type_ids=True)
        assert [encoding.ids] == expected["input_ids"], (text, pair)
        assert [encoding.type_ids] == expected["token_type_ids"], (text, pair)
    assert_equal_together(ours)


def assert_equal_together(tokenizer: Tokenizer) -> None:
    """Neither without offsets, nor by its words where it has any, does a text have other ids or types."""
    expected = [tokenizer.encode(text) for text in TEXTS]
    quick = tokenizer.encode_batch_fast(TEXTS)
    assert [each.ids for each in quick] == [each.ids for each in expected]
    assert [each.type_ids for each in quick] == [each.type_ids for each in expected]
    words = words_of(tokenizer)
    if isinstance(tokenizer.model, models.WordPiece):
        assert words is not None
        assert [ids.tolist() for ids in words.encode(TEXTS)] == [each.ids for each in expected]
        assert not any(any(each.type_ids) for each in expected)
    else:
        assert words is None


# --- WordPiece


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


# --- byte-level BPE


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt, learned from the texts; the special tokens of RoBERTa and GPT-2 are in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    folder = tmp_path_factory.mktemp("byte level")
    tokenizer.model.save(str(folder))
    return folder


def with_vocabulary(byte_level: Path, folder: Path, model_type: str, **config: object) -> Path:
    shutil.copytree(byte_level, folder, dirs_exist_ok=True)
    write_json(folder / "config.json", {"model_type": model_type})
    if config:
        write_json(folder / "tokenizer_config.json", config)
    return folder


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("roberta", {}),
        ("roberta", {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True, "trim_offsets": False}),
        (
            "roberta",
            {
                "tokenizer_class": "RobertaTokenizerFast",
                "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True},
            },
        ),
        ("gpt2", {}),
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_eos_token": True}),
        ("qwen2", {"tokenizer_class": "Qwen2Tokenizer"}),
    ],
)
def test_vocabulary_of_bytes_gives_the_ids_of_transformers(tmp_path, byte_level, model_type, config):
    assert_equal_ids(with_vocabulary(byte_level, tmp_path, model_type, **config), {"model_type": model_type})


# --- SentencePiece, and the kinds that transformers makes


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


def test_tokenizer_code_of_the_publisher_is_never_run(tmp_path, minilm_dir):
    auto_map = {"AutoTokenizer": ["tokenization.Mine", None]}
    word_piece(tmp_path, minilm_dir, {"tokenizer_class": "Mine", "auto_map": auto_map}, model_type="unheard")
    (tmp_path / "tokenization.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\nclass Mine: pass\n")
    with pytest.raises(StartupError, match=r"cannot make it of `vocab\.txt`"):
        load(tmp_path, {"model_type": "unheard"})
    assert not (tmp_path / "marker").exists()


# --- tokenizer.json


@pytest.mark.parametrize("directory", ["minilm_dir", "splade_dir"])
def test_published_word_pieces_give_the_ids_of_transformers(request, tmp_path, directory):
    source = request.getfixturevalue(directory)
    made = json.loads((source / "tokenizer.json").read_text()) | {"truncation": None, "padding": None}
    write_json(tmp_path / "tokenizer.json", made)  # transformers would pad by it
    shutil.copy(source / "tokenizer_config.json", tmp_path)
    assert_equal_ids(tmp_path)


def test_published_unigrams_give_the_ids_of_transformers(tmp_path, xlm_r_tokenizer_dir):
    (tmp_path / "tokenizer.json").symlink_to(xlm_r_tokenizer_dir / "tokenizer.json")
    # a class of its own would have transformers 5 build another pipeline than the file's, without the last space
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    assert_equal_ids(tmp_path)


def test_sentence_has_the_ids_that_xlm_roberta_is_known_for(xlm_r_tokenizer_dir):
    assert load(xlm_r_tokenizer_dir, {}).encode("Hello world!").ids == [0, 35378, 8999, 38, 2]


def test_truncation_and_padding_of_the_file_are_reset(minilm_dir):
    tokenizer = load(minilm_dir, {})
    assert (tokenizer.truncation, tokenizer.padding) == (None, None)
    assert len(tokenizer.encode("word " * 1000).ids) == 1002


def test_file_of_a_newer_format_names_the_version_of_the_library(tmp_path):
    write_json(tmp_path / "tokenizer.json", {"version": "9.0", "model": {"type": "Unheard"}})
    with pytest.raises(StartupError, match=f"cannot be read by tokenizers {tokenizers.__version__}"):
        load(tmp_path, {})


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer_config.json"])
def test_lfs_pointer_is_named(tmp_path, minilm_dir, name):
    word_piece(tmp_path, minilm_dir, {"tokenizer_class": "BertTokenizer"})
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 134\n")
    with pytest.raises(StartupError, match=rf"{name} is a Git LFS pointer"):
        load(tmp_path, {"model_type": "bert"})


def test_folder_without_any_vocabulary_is_refused_with_the_names(tmp_path):
    with pytest.raises(StartupError, match=r"`tokenizer\.json` not found .*vocab\.txt, vocab\.json, sentencepiece"):
        load(tmp_path, {"model_type": "bert"})


# --- gte-Qwen2

GTE_QWEN2 = {"model_type": "qwen2", "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}


@pytest.fixture
def qwen2(tmp_path: Path, byte_level: Path) -> Callable[..., Path]:
    def write(post_processor: processors.PostProcessor | None) -> Path:
        tokenizer = load(with_vocabulary(byte_level, tmp_path, "qwen2"), {"model_type": "gpt2"})
        tokenizer.post_processor = post_processor
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    return write


def ending(first: str = "") -> processors.PostProcessor:
    template = f"{first}$A <|endoftext|>".strip()
    return processors.TemplateProcessing(template, f"{template} $B:1 <|endoftext|>:1", [("<|endoftext|>", 5)])


@pytest.mark.parametrize("post_processor", [None, processors.ByteLevel(trim_offsets=False), ending()])
def test_every_text_of_gte_qwen2_ends_once(qwen2, post_processor):
    tokenizer = load(qwen2(post_processor), GTE_QWEN2)
    bare = tokenizer.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello").ids == [*bare, 5]
    assert tokenizer.encode("hello", "hello").ids == [*bare, 5, *bare, 5]
    assert tokenizer.num_special_tokens_to_add(False) == 1


def test_gte_qwen2_that_adds_something_else_is_refused(qwen2):
    start = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    with pytest.raises(StartupError, match=r"must end in <\|endoftext\|>, but `tokenizer.json` adds other tokens"):
        load(qwen2(start), GTE_QWEN2)


@pytest.mark.parametrize("auto_map", [None, {}, "modeling_qwen.Qwen2Model", {"AutoModel": "modeling.Other"}])
def test_other_qwen2_models_are_left_as_they_are(qwen2, auto_map):
    tokenizer = load(qwen2(None), {"model_type": "qwen2", "auto_map": auto_map})
    assert tokenizer.encode("hello").ids == tokenizer.encode("hello", add_special_tokens=False).ids


@pytest.mark.parametrize("asked", [True, False])
def test_add_eos_token_has_no_effect_beside_tokenizer_json_as_in_transformers(qwen2, asked):
    folder = qwen2(ending() if not asked else None)
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "add_eos_token": asked}
    write_json(folder / "tokenizer_config.json", config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert load(folder, {"model_type": "qwen2"}).encode("hello").ids == theirs("hello")["input_ids"]
