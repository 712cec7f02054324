"""Vectors straight from reply bytes: a packed float field is the array's own little-endian bytes.

Replies in another valid encoding (unpacked floats, fields unknown here) are left to protobuf; the values are the same.
"""

from collections.abc import Iterator

import numpy as np

from tei_client.pb import tei_pb2
from tei_client.types import Floats, SparseVector

FIRST_FIELD = 0x0A  # field 1, length-delimited: `embeddings` and `token_embeddings`
METADATA_FIELD = 0x12  # field 2, length-delimited
LITTLE_ENDIAN = np.dtype("<f4")


def decode_embedding(data: bytes) -> Floats:
    """Return the vector [dim] of an EmbedResponse, read-only. Raises protobuf's DecodeError for anything else."""
    try:
        return _floats(memoryview(data))
    except (ValueError, IndexError):
        return np.array(tei_pb2.EmbedResponse.FromString(data).embeddings, np.float32)


def decode_token_embeddings(data: bytes) -> Floats:
    """Return the vectors [tokens, hidden] of an EmbedAllResponse. Raises protobuf's DecodeError for anything else."""
    try:
        rows = [_floats(payload) for payload in _first_fields(memoryview(data))]
    except (ValueError, IndexError):
        message = tei_pb2.EmbedAllResponse.FromString(data)
        rows = [np.array(row.embeddings, np.float32) for row in message.token_embeddings]
    return np.stack(rows) if rows else np.empty((0, 0), np.float32)


def decode_sparse_embedding(data: bytes) -> SparseVector:
    """Return the entries of an EmbedSparseResponse. Raises protobuf's DecodeError for anything else."""
    entries = tei_pb2.EmbedSparseResponse.FromString(data).sparse_embeddings
    indices = np.fromiter((entry.index for entry in entries), np.uint32, len(entries))
    values = np.fromiter((entry.value for entry in entries), np.float32, len(entries))
    return SparseVector(indices, values)


def _floats(data: memoryview) -> Floats:
    chunks = [np.frombuffer(payload, LITTLE_ENDIAN) for payload in _first_fields(data)]
    if not chunks:
        return np.empty(0, np.float32)
    values = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)  # a packed field may come in several pieces
    return values.astype(np.float32, copy=False)


def _first_fields(data: memoryview) -> Iterator[memoryview]:
    """Yield the payloads of field 1. Raises ValueError or IndexError when not all is plainly field 1 and metadata."""
    position = 0
    while position < len(data):
        tag = data[position]
        length, start = _varint(data, position + 1)
        position = start + length
        if tag not in (FIRST_FIELD, METADATA_FIELD) or position > len(data):
            raise ValueError("not the usual encoding")
        if tag == FIRST_FIELD:
            yield data[start:position]


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the number at `position` and the position after it."""
    value = shift = 0
    while data[position] > 0x7F:
        value |= (data[position] & 0x7F) << shift
        shift += 7
        position += 1
    return value | data[position] << shift, position + 1
