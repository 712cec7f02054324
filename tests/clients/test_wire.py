import struct

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tei_client.pb import tei_pb2
from tei_client.wire import decode_embedding, decode_sparse_embedding, decode_token_embeddings

METADATA = tei_pb2.Metadata(compute_chars=300, compute_tokens=5, total_time_ns=2**40)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=70)


def field(number, payload):
    """A length-delimited field shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(payload)]) + payload


@given(FLOATS)
def test_embedding_is_what_protobuf_reads(values):
    data = tei_pb2.EmbedResponse(embeddings=values, metadata=METADATA).SerializeToString()
    expected = np.array(tei_pb2.EmbedResponse.FromString(data).embeddings, np.float32)
    decoded = decode_embedding(data)
    assert decoded.dtype == np.float32
    assert decoded.tobytes() == expected.tobytes()


@given(st.binary(max_size=31).map(lambda data: data * 4))
def test_embedding_is_the_bytes_on_the_wire(payload):
    assert decode_embedding(field(1, payload)).tobytes() == payload


@given(st.integers(1, 40), st.integers(0, 5))
def test_token_embeddings_are_what_protobuf_reads(hidden, tokens):
    rows = np.random.default_rng(hidden).standard_normal((tokens, hidden)).astype(np.float32)
    message = tei_pb2.EmbedAllResponse(metadata=METADATA)
    for row in rows:
        message.token_embeddings.add(embeddings=row)
    decoded = decode_token_embeddings(message.SerializeToString())
    assert decoded.tobytes() == rows.tobytes()
    assert decoded.shape == (rows.shape if tokens else (0, 0))


ONE, TWO = struct.pack("<f", 1), struct.pack("<f", 2)


@pytest.mark.parametrize(
    "data",
    [
        field(1, ONE) + field(1, TWO),
        b"\x0d" + ONE + b"\x0d" + TWO,
        field(1, ONE) + b"\x0d" + TWO,
        field(2, METADATA.SerializeToString()) + field(1, ONE + TWO),
        field(1, ONE + TWO) + b"\x18\x05",
        field(15, b"later") + field(1, ONE + TWO),
    ],
    ids=["in pieces", "unpacked", "mixed", "metadata first", "unknown number", "unknown text"],
)
def test_every_valid_encoding_is_read(data):
    assert decode_embedding(data).tolist() == list(tei_pb2.EmbedResponse.FromString(data).embeddings) == [1, 2]
    (row,) = decode_token_embeddings(field(1, data)).tolist()
    assert row == [1, 2]


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x08" + ONE, b"\x0a\xff", field(1, b"abc")])
def test_broken_reply_is_an_error(data):
    with pytest.raises(DecodeError):
        decode_embedding(data)
    with pytest.raises(DecodeError):
        decode_token_embeddings(field(1, data) if len(data) < 4 else data[:3])


def test_sparse_embedding_has_an_index_for_every_value():
    reply = tei_pb2.EmbedSparseResponse()
    reply.sparse_embeddings.add(index=0, value=0.5)
    reply.sparse_embeddings.add(index=2**32 - 1, value=2)
    vector = decode_sparse_embedding(reply.SerializeToString())
    assert (vector.indices.dtype, vector.values.dtype) == (np.uint32, np.float32)
    assert vector.indices.tolist() == [0, 2**32 - 1]
    assert vector.values.tolist() == [0.5, 2]
