"""Damage to bytes, as hypothesis draws it: shared by all that is fuzzed."""

import random
from typing import NamedTuple

from hypothesis import strategies as st


class Edit(NamedTuple):
    """`removed` bytes at `place` give way to `added`; places beyond the end wrap around."""

    place: int
    removed: int
    added: bytes


EDGES = (b"\x00", b"\x7f", b"\x80", b"\xff", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\x00" * 8)

edits = st.lists(
    st.builds(
        Edit,
        place=st.integers(0, 2**16),
        removed=st.integers(0, 16),
        added=st.sampled_from(EDGES) | st.binary(max_size=16),
    ),
    max_size=4,
)


def damage(raw: bytes, edits: list[Edit]) -> bytes:
    """`raw` after all edits, in order."""
    for place, removed, added in edits:
        at = place % (len(raw) + 1)
        raw = raw[:at] + added + raw[at + removed :]
    return raw


def vary(raw: bytes, rng: random.Random) -> bytes:
    """`raw` with one to three places damaged, mostly so that its length, and so its structure, stays."""
    varied = bytearray(raw)
    for _ in range(1 + int(3 * rng.random())):
        at, size, way = int((len(varied) + 1) * rng.random()), 1 + int(8 * rng.random()), int(10 * rng.random())
        if way == 0:
            varied[at:at] = rng.choice(EDGES)
        elif way == 1:
            del varied[at : at + size]
        elif way == 2:
            varied[at : at + size] = rng.randbytes(size)
        elif way == 3:
            varied += raw  # to protobuf one message, of which the later fields count
        elif at < len(varied):
            varied[at] ^= 1 << int(5 * rng.random())  # letters stay ASCII
    return bytes(varied)
