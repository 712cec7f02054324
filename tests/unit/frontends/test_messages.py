import pytest

from tei_grpc.frontends.messages import (
    Admit,
    Answered,
    Broken,
    Cancel,
    Drain,
    Failed,
    Granted,
    Healthy,
    Listening,
    Loaded,
    Located,
    Ready,
    Refused,
    Release,
    Reload,
    Submit,
    Withdraw,
    decode,
    encode,
)

LARGE = 2**63 - 1
MESSAGES = [
    Listening(),
    Ready(),
    Broken("`--tls-cert`: «none»"),
    Admit(LARGE, True),
    Withdraw(1),
    Release(2**32 - 1),
    Submit(LARGE, 3, 2, 8192, True, 7, LARGE, LARGE),
    Cancel(4),
    Located('["/model", null]'),
    Loaded(512, "{}"),
    Healthy(False),
    Granted(5, 6),
    Refused(7),
    Answered(8, 2**33, 512, LARGE, LARGE, 4096, True),
    Failed(9, 3, ""),
    Reload(),
    Drain(),
]


def test_messages_come_out_as_they_went_in():
    data = bytearray(b"".join(map(encode, MESSAGES)))
    assert decode(data) == MESSAGES
    assert data == b""


@pytest.mark.parametrize("size", [1, 7, 64])
def test_pieces_of_any_size_make_the_same_messages(size):
    whole, data, decoded = b"".join(map(encode, MESSAGES)), bytearray(), []
    for start in range(0, len(whole), size):
        data += whole[start : start + size]
        decoded += decode(data)
    assert decoded == MESSAGES
