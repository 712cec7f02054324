import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tei_grpc.pb import tei_pb2
from tei_grpc.rpc import reply
from tei_grpc.types import EmbedAllResult, EmbedResult, EmbedSparseResult, Metadata, SimpleToken

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**63 - 1)
METADATA = st.builds(
    Metadata,
    compute_chars=UINT32,
    compute_tokens=UINT32,
    total_time_ns=UINT64,
    tokenization_time_ns=UINT64,
    queue_time_ns=UINT64,
    inference_time_ns=UINT64,
)
ZERO = Metadata(0, 0, 0, 0, 0, 0)
FLOATS = st.floats(width=32)


def by_protobuf(message, metadata):
    message.metadata.SetInParent()
    for name in message.metadata.DESCRIPTOR.fields_by_name:
        setattr(message.metadata, name, getattr(metadata, name))
    return message.SerializeToString()


@given(hnp.arrays(np.float32, st.integers(0, 600), elements=FLOATS), METADATA)
def test_vector_is_encoded_as_protobuf_does(vector, metadata):
    expected = by_protobuf(tei_pb2.EmbedResponse(embeddings=vector), metadata)
    assert reply.encode_embed(EmbedResult(vector, metadata)) == expected


@given(hnp.arrays(np.float32, st.tuples(st.integers(0, 9), st.integers(0, 40)), elements=FLOATS), METADATA)
def test_token_vectors_are_encoded_as_protobuf_does(rows, metadata):
    message = tei_pb2.EmbedAllResponse(token_embeddings=[tei_pb2.TokenEmbedding(embeddings=row) for row in rows])
    assert reply._join_rows(EmbedAllResult(rows, metadata)) == by_protobuf(message, metadata)


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 2000])
async def test_sparse_values_are_encoded_as_protobuf_does(count):
    indices, values = np.arange(count, dtype=np.uint32), np.arange(count, dtype=np.float32) + 0.5
    entries = [tei_pb2.SparseValue(index=index, value=index + 0.5) for index in range(count)]
    expected = by_protobuf(tei_pb2.EmbedSparseResponse(sparse_embeddings=entries), ZERO)
    assert await reply.encode_embed_sparse(EmbedSparseResult(indices, values, ZERO)) == expected


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 2000])
def test_tokens_are_encoded_as_protobuf_does(count):
    tokens = [SimpleToken(id, "é", False, id, id + 2) for id in range(count)] + [
        SimpleToken(1, "[SEP]", True, None, None)
    ]
    expected = tei_pb2.EncodeResponse(tokens=[tei_pb2.SimpleToken(**token._asdict()) for token in tokens])
    assert reply.encode_tokens(iter(tokens)) == expected.SerializeToString()


def test_zero_metadata_is_present_and_empty():
    encoded = reply.encode_embed(EmbedResult(np.array([1], np.float32), ZERO))
    assert encoded == b"\x0a\x04\x00\x00\x80\x3f\x12\x00"


@pytest.mark.parametrize("vector", [np.arange(8, dtype=">f4"), np.arange(16, dtype=np.float32)[::2], np.arange(8.0)])
def test_any_layout_becomes_contiguous_little_endian(vector):
    message = tei_pb2.EmbedResponse.FromString(reply.encode_embed(EmbedResult(vector, ZERO)))
    assert list(message.embeddings) == vector.tolist()


async def test_large_replies_are_put_together_off_the_loop(monkeypatch):
    threads = []

    async def to_thread(function, *arguments):
        threads.append(function)
        return function(*arguments)

    monkeypatch.setattr(reply.asyncio, "to_thread", to_thread)
    for tokens, count in ((16, 0), (512, 1)):
        rows = np.ones((tokens, 384), np.float32)
        message = tei_pb2.EmbedAllResponse.FromString(await reply.encode_embed_all(EmbedAllResult(rows, ZERO)))
        assert len(message.token_embeddings) == tokens
        assert len(threads) == count
