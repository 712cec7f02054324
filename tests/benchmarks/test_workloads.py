"""The workloads are what they say, and the arithmetic on them is right."""

import statistics
from pathlib import Path

import pytest

from benchmarks.limit import Shape
from benchmarks.measurements import Measurements
from benchmarks.workloads import WORKLOADS, read_tokenizer, write_texts
from tests.checkpoints import make_checkpoint


def test_text_has_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint("bert-mean", tmp_path)
    texts = write_texts(folder, [3, 10, 77])
    assert [len(encoding) for encoding in read_tokenizer(folder).encode_batch(texts)] == [3, 10, 77]
    assert texts == write_texts(folder, [3, 10, 77])


@pytest.mark.parametrize(
    ("name", "median", "least", "most"), [("Q", 9, 3, 32), ("P", 80, 8, 512), ("L", 512, 512, 512)]
)
def test_lengths_are_distributed_as_stated(name: str, median: int, least: int, most: int) -> None:
    lengths = WORKLOADS[name].lengths(20_000, limit=512)
    assert statistics.median(lengths) == pytest.approx(median, rel=0.03)
    assert min(lengths) >= least
    assert max(lengths) <= most


def test_no_text_is_longer_than_the_model_takes() -> None:
    assert max(WORKLOADS["P"].lengths(1000, limit=100)) == 100


def test_flops_are_those_of_the_products() -> None:
    # a layer of hidden size 2 and intermediate size 3, for 5 tokens, a multiplication and an addition each:
    # q, k, v and the output are 2 x 2 each, the MLP is 2 x 3 twice; q k^T and p v are 5 x 5 x 2 each
    expected = 2 * (5 * (4 * 2 * 2 + 2 * 2 * 3) + 2 * 5 * 5 * 2)
    assert Shape(layers=1, hidden=2, intermediate=3).flops([5]) == expected
    assert Shape(layers=7, hidden=2, intermediate=3).flops([5, 5]) == 14 * expected


def test_ratios_are_taken_within_a_round() -> None:
    found = Measurements("texts/s")
    for ours, theirs in ((10.0, 5.0), (100.0, 50.0), (8.0, 2.0)):
        found.add("Q", "theirs", theirs)
        found.add("Q", "ours", ours, "theirs")
    theirs_row, ours_row = found.rows()
    assert (theirs_row.value, theirs_row.ratio) == (5.0, None)
    assert (ours_row.value, ours_row.ratio, ours_row.base) == (10.0, 2.0, "theirs")
