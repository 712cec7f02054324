"""`tokenizer.json` gives the ids of transformers; what is said where it cannot be read or made."""

import json
import shutil

import pytest
import tokenizers

from tei_grpc.engine.tokenizer import load
from tei_grpc.errors import StartupError
from tests.folders import write_json
from tests.unit.loading.texts import assert_equal_ids


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


def test_folder_without_any_vocabulary_is_refused_with_the_names(tmp_path):
    with pytest.raises(StartupError, match=r"`tokenizer\.json` not found .*vocab\.txt, vocab\.json, sentencepiece"):
        load(tmp_path, {"model_type": "bert"})
