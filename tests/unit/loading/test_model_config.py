"""What a checkpoint's config says of its kind, its labels and its longest input."""

import pytest

from tei_grpc.errors import StartupError
from tei_grpc.loading.model_config import position_offset, read_labels
from tei_grpc.types import ModelType, Pooling
from tests import folders
from tests.unit.loading.descriptions import read, refusal


@pytest.mark.parametrize("architectures", [{}, {"architectures": None}, {"architectures": []}])
def test_model_without_architectures_embeds(tmp_path, architectures):
    folder = folders.embedder(tmp_path)
    config = {key: value for key, value in folders.CONFIG.items() if key != "architectures"}
    folders.write_json(folder / "config.json", {**config, **architectures})
    assert read(folder).kind is ModelType.EMBEDDING


@pytest.mark.parametrize("head", ["BertForTokenClassification", "BertForQuestionAnswering", "BertForMaskedLM"])
def test_other_heads_serve_as_encoders(tmp_path, head):
    model = read(folders.embedder(tmp_path, architectures=[head], id2label={"0": "O", "1": "B"}))
    assert (model.kind, model.pooling, model.labels) == (ModelType.EMBEDDING, (Pooling.MEAN,), ())


def test_one_label_makes_a_reranker(tmp_path):
    model = read(folders.reranker(tmp_path))
    assert (model.kind, model.pooling, model.labels) == (ModelType.RERANKER, (), ("relevance",))


def test_reranker_saved_with_two_labels_is_a_classifier(tmp_path):
    assert read(folders.classifier(tmp_path, "no", "yes")).kind is ModelType.CLASSIFIER


def test_labels_are_ordered_by_number():
    assert read_labels({"id2label": {"2": "c", "0": "a", "1": "b"}}) == ("a", "b", "c")
    ten = {str(i): f"label{i}" for i in (9, 10, *range(9))}
    assert read_labels({"id2label": ten}) == tuple(f"label{i}" for i in range(11))


def test_gap_in_the_labels_is_filled():
    assert read_labels({"id2label": {"0": "a", "2": "c"}}) == ("a", "LABEL_1", "c")


@pytest.mark.parametrize(
    ("config", "number"), [({}, 2), ({"num_labels": 3}, 3), ({"id2label": None, "num_labels": 1}, 1)]
)
def test_labels_without_names_are_numbered(config, number):
    assert read_labels(config) == tuple(f"LABEL_{i}" for i in range(number))


@pytest.mark.parametrize(
    "config",
    [
        {"id2label": {"zero": "a"}},
        {"id2label": {"-1": "a"}},
        {"id2label": {"99999999999999999999": "a"}},
        {"id2label": ["a"]},
        {"num_labels": "3"},
        {"num_labels": -3},
        {"num_labels": 10**12},
    ],
)
def test_labels_that_cannot_be_are_refused(config):
    with pytest.raises(StartupError, match=r"`config.json`"):
        read_labels(config)


def test_problem_type_says_multi_label(tmp_path):
    folder = folders.classifier(tmp_path, "a", "b", problem_type="multi_label_classification")
    assert read(folder).multi_label


@pytest.mark.parametrize(
    ("model_type", "pad", "offset"),
    [
        ("bert", 0, 0),
        ("roberta", 1, 2),
        ("xlm-roberta", 1, 2),
        ("camembert", 1, 2),
        ("roberta", None, 1),
        ("mpnet", 1, 2),
    ],
)
def test_positions_start_after_the_padding_row(model_type, pad, offset):
    assert position_offset({"model_type": model_type, "pad_token_id": pad}) == offset


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({"sentence_bert_config.json": {"max_seq_length": 20}}, 20),
        ({"sentence_bert_config.json": {"max_seq_length": 10_000}}, 40),
        (
            {"sentence_bert_config.json": {"max_seq_length": None}, "tokenizer_config.json": {"model_max_length": 30}},
            30,
        ),
        (
            {"sentence_bert_config.json": {"do_lower_case": False}, "tokenizer_config.json": {"model_max_length": 30}},
            30,
        ),
        ({"sentence_roberta_config.json": {"max_seq_length": 20}}, 20),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 40),
        ({"tokenizer_config.json": {"model_max_length": 10**30}}, 40),
        ({"tokenizer_config.json": {"model_max_length": 30}}, 30),
        ({}, 40),
    ],
)
def test_longest_input_is_the_strictest_limit(tmp_path, files, length):
    assert read(folders.embedder(tmp_path, files)).max_input_length == length


def test_positions_before_the_first_are_no_room(tmp_path):
    folder = folders.embedder(tmp_path, model_type="roberta", pad_token_id=1, max_position_embeddings=42)
    assert read(folder).max_input_length == 40


@pytest.mark.parametrize("key", ["max_trained_positions", "n_positions"])
def test_positions_have_several_names(tmp_path, key):
    folder = folders.embedder(tmp_path, max_position_embeddings=None, **{key: 24})
    assert read(folder).max_input_length == 24


def test_model_that_names_no_limit_is_refused(tmp_path):
    assert "how long an input may be" in refusal(folders.embedder(tmp_path, max_position_embeddings=None))


def test_model_without_a_position_is_refused(tmp_path):
    folder = folders.embedder(tmp_path, model_type="roberta", pad_token_id=1, max_position_embeddings=2)
    assert refusal(folder) == "`config.json` leaves no position for a token"


def test_longest_input_is_lowered_to_the_batch(tmp_path, caplog):
    assert read(folders.embedder(tmp_path), max_batch_tokens=16).max_input_length == 16
    assert "the longest input is lowered from 40 to `--max-batch-tokens` 16" in caplog.text


def test_batch_too_small_for_the_longest_input_is_refused_on_request(tmp_path):
    text = refusal(folders.embedder(tmp_path), max_batch_tokens=16, auto_truncate=False)
    assert "`--max-batch-tokens` (16) must not be less than the model's longest input (40)" in text
