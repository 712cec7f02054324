"""CUDA graphs without CUDA: which bucket a batch falls into, how it is filled up, and that a graph is proven first."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tei_grpc.engine.batch import pack
from tei_grpc.engine.graphs import SIZES, Bucket, Graphs, buckets, difference, sample
from tei_grpc.layers.packed import PackedInputs, place
from tei_grpc.types import Batch, Entry, Kind
from tests.pipelines import capture

CPU = torch.device("cpu")
SHAPES = [Bucket(32, 9, 32), Bucket(64, 17, 64)]
TABLE = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))


def batch(*lengths: int) -> Batch:
    return pack([Entry(row, Kind.EMBED, np.full(length, row + 1, np.int32)) for row, length in enumerate(lengths)])


def on_cpu(batch: Batch, blank: Sequence[int]) -> PackedInputs:
    return place(batch, CPU, blank=blank)


def encode(inputs: PackedInputs) -> Tensor:
    """Every token sees the length and the first token of its text."""
    lengths = inputs.cu_seqlens.diff()[inputs.text_ids, None]
    firsts = inputs.input_ids[inputs.first_rows][inputs.text_ids]
    return TABLE[inputs.input_ids] + TABLE[firsts] + lengths


def recorded(encode: Callable[[PackedInputs], Tensor] = encode) -> Graphs:
    graphs = Graphs(encode, capture, SHAPES, vocabulary=100)
    graphs.record(on_cpu)
    return graphs


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.sampled_from(buckets(16384, 512)))
def test_blank_texts_fill_a_bucket_exactly(lengths: list[int], bucket: Bucket) -> None:
    some = batch(*lengths)
    if not bucket.holds(some):
        return
    inputs = on_cpu(some, bucket.blank(some))
    assert len(inputs.input_ids) == bucket.tokens
    assert len(inputs.cu_seqlens) == bucket.texts + 1
    assert int(inputs.cu_seqlens.diff().max()) <= bucket.longest
    assert int(inputs.first_rows.max()) < bucket.tokens
    assert inputs.offsets[: len(lengths) + 1] == tuple(np.cumsum([0, *lengths]))


@pytest.mark.parametrize("lengths", [(512,), (3,) * 200, (64,) * 15, (1, 2, 500, 7)])
def test_batch_that_graphs_are_for_has_a_bucket_of_less_than_twice_its_size(lengths: tuple[int, ...]) -> None:
    some = batch(*lengths)
    bucket = next(bucket for bucket in buckets(16384, 512) if bucket.holds(some))
    assert sum(lengths) < bucket.tokens <= 2 * sum(lengths)


def test_few_long_texts_do_not_pay_for_many_and_short_ones_not_for_long() -> None:
    found = buckets(16384, 8192)
    assert max(bucket.texts * -(-bucket.longest // 128) for bucket in found) < 4200
    assert next(b for b in found if b.holds(batch(*[20] * 100))).longest == 128
    assert next(b for b in found if b.holds(batch(1500, 400))).longest == 2048


def test_no_bucket_is_larger_than_batches_may_become() -> None:
    assert max(bucket.tokens for bucket in buckets(100, 512)) == 128
    assert max(bucket.tokens for bucket in buckets(16384, 512)) == SIZES[-1]


def test_no_blank_text_is_longer_than_the_model_takes() -> None:
    assert all(bucket.longest <= 40 for bucket in buckets(16384, 40))


@pytest.mark.parametrize("lengths", [(1,), (3, 9), (31,), (1,) * 8, (40, 2), (5,) * 9])
def test_graph_gives_what_the_encoder_gives(lengths: tuple[int, ...]) -> None:
    graphs, some = recorded(), batch(*lengths)
    bucket = graphs.find(some)
    hidden = graphs.encode(bucket, on_cpu(some, bucket.blank(some)))[: sum(lengths)]
    torch.testing.assert_close(hidden, encode(on_cpu(some, ())))


def test_what_a_graph_gave_outlives_its_next_run() -> None:
    graphs, first, second = recorded(), batch(4), batch(9)
    hidden = graphs.encode(SHAPES[0], on_cpu(first, SHAPES[0].blank(first)))
    before = hidden.clone()
    graphs.encode(SHAPES[0], on_cpu(second, SHAPES[0].blank(second)))
    assert hidden.equal(before)


def test_smallest_bucket_that_holds_a_batch_is_taken() -> None:
    graphs = recorded()
    assert graphs.find(batch(31)) == SHAPES[0]
    assert graphs.find(batch(32)) == SHAPES[1]
    assert graphs.find(batch(*[1] * 9)) == SHAPES[1]
    assert graphs.find(batch(64)) is None
    assert graphs.find(batch(*[1] * 17)) is None


def looks_at_the_host(inputs: PackedInputs) -> Tensor:
    return encode(inputs) * max(group.length for group in inputs.groups)


def depends_on_the_longest_text(inputs: PackedInputs) -> Tensor:
    return encode(inputs) * inputs.max_seqlen


@pytest.mark.parametrize("encode", [looks_at_the_host, depends_on_the_longest_text])
def test_encoder_that_a_graph_cannot_hold_goes_without(
    caplog: pytest.LogCaptureFixture, encode: Callable[[PackedInputs], Tensor]
) -> None:
    caplog.set_level(logging.INFO, logger="tei_grpc.engine.graphs")
    assert recorded(encode).find(batch(3)) is None
    assert "small batches run without CUDA graphs" in caplog.text


def test_graph_that_ignores_its_inputs_is_not_used() -> None:
    def stuck(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        return lambda: None, run()

    graphs = Graphs(encode, stuck, SHAPES, vocabulary=100)
    graphs.record(on_cpu)
    assert graphs.find(batch(3)) is None


def test_lack_of_memory_is_not_hidden() -> None:
    def full(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Graphs(encode, full, SHAPES, vocabulary=100).record(on_cpu)


@pytest.mark.parametrize("bucket", buckets(16384, 512) + buckets(16384, 40) + [Bucket(192, 12, 20)])
def test_sample_is_a_batch_of_its_bucket(bucket: Bucket) -> None:
    assert bucket.holds(sample(bucket, 100, seed=0))


def test_nan_is_no_small_difference() -> None:
    assert not difference(torch.tensor([1.0, torch.nan]), torch.ones(2)) <= 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_graph_of_the_device_gives_what_the_encoder_gives() -> None:
    from tei_grpc.engine.graphs import cuda_capture

    device, some = torch.device("cuda"), batch(3, 9)
    table = TABLE.to(device)

    def encode_there(inputs: PackedInputs) -> Tensor:
        return table[inputs.input_ids] + inputs.cu_seqlens.diff()[inputs.text_ids, None]

    graphs = Graphs(encode_there, cuda_capture(), SHAPES, vocabulary=100)
    graphs.record(lambda batch, blank: place(batch, device, blank=blank))
    bucket = graphs.find(some)
    hidden = graphs.encode(bucket, place(some, device, blank=bucket.blank(some)))[:12]
    torch.testing.assert_close(hidden, encode_there(place(some, device)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_encoder_that_waits_for_the_device_leaves_it_fit_for_others() -> None:
    from tei_grpc.engine.graphs import cuda_capture

    device, stream = torch.device("cuda"), torch.cuda.current_stream()
    table = TABLE.to(device)
    capture = cuda_capture()

    def waits(inputs: PackedInputs) -> Tensor:
        return table[inputs.input_ids] * int(inputs.input_ids.max())

    for encode_there, size in ((waits, None), (lambda inputs: table[inputs.input_ids], SHAPES[0])):
        graphs = Graphs(encode_there, capture, SHAPES, vocabulary=100)
        graphs.record(lambda batch, blank: place(batch, device, blank=blank))
        assert graphs.find(batch(3)) == size
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.get_sync_debug_mode() == 0


def test_inputs_of_a_graph_lie_where_it_reads() -> None:
    """Replaced tensors would leave the graph with the batch that it was recorded with."""
    seen = []

    def remember(inputs: PackedInputs) -> Tensor:
        seen.append(inputs.input_ids.data_ptr())
        return encode(inputs)

    graphs = recorded(remember)
    start = len(seen)
    for lengths in ((3,), (9, 2)):
        graphs.encode(SHAPES[0], on_cpu(batch(*lengths), SHAPES[0].blank(batch(*lengths))))
    assert len(set(seen[start:])) == 1
