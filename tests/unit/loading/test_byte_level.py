"""`vocab.json` with `merges.txt` gives the ids of transformers, with gte-Qwen2's ending where that belongs."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from tei_grpc.engine.tokenizer import load
from tei_grpc.errors import StartupError
from tests.folders import write_json
from tests.unit.loading.texts import TEXTS, assert_equal_ids


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
