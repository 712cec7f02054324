"""What a front-end and the process with the model say to each other, and its bytes: a header, fields, perhaps a text.

Only these two, parent and child, hold the ends of the channel, so what comes is well-formed.
"""

from struct import Struct
from typing import Any, NamedTuple, TypeAlias


class Listening(NamedTuple):
    """From a front-end: its ports are bound, and health answers."""


class Ready(NamedTuple):
    """From a front-end: it serves."""


class Broken(NamedTuple):
    """From a front-end: it cannot start."""

    text: str


class Admit(NamedTuple):
    """From a front-end: an input wants a permit."""

    id: int
    waits: bool


class Withdraw(NamedTuple):
    """From a front-end: the input that waits for a permit does not want it any more."""

    id: int


class Release(NamedTuple):
    """From a front-end: a permit comes back, and its slot with it."""

    slot: int


class Submit(NamedTuple):
    """From a front-end: an entry, whose ids are in the slot. `deadline_ns` 0: none; `kind`: its place in Kind."""

    id: int
    slot: int
    kind: int
    length: int
    has_types: bool
    prompt_tokens: int
    deadline_ns: int
    queued_ns: int


class Cancel(NamedTuple):
    """From a front-end: nobody waits for the entry any more."""

    id: int


class Located(NamedTuple):
    """To a front-end: where the checkpoint's files are. The text is a Snapshot in JSON."""

    text: str


class Loaded(NamedTuple):
    """To a front-end: the model runs. The text is ModelFacts in JSON."""

    longest: int  # tokens that a slot has room for
    text: str


class Healthy(NamedTuple):
    """To a front-end: whether the device runs."""

    healthy: bool


class Granted(NamedTuple):
    """To a front-end: a permit, and the slot that goes with it."""

    id: int
    slot: int


class Refused(NamedTuple):
    """To a front-end: no permit is free."""

    id: int


class Answered(NamedTuple):
    """To a front-end: an output. Its arrays are in the entry's slot, or in a file that comes with the message."""

    id: int
    words: int  # 4-byte values of all arrays
    rows: int  # of the first array
    queue_ns: int
    inference_ns: int
    batch_size: int
    has_file: bool


class Failed(NamedTuple):
    """To a front-end: an entry failed. `kind`: its place in ErrorKind."""

    id: int
    kind: int
    text: str


class Reload(NamedTuple):
    """To a front-end: read keys and certificates anew."""


class Drain(NamedTuple):
    """To a front-end: finish what is under way, and end."""


Message: TypeAlias = (
    Listening
    | Ready
    | Broken
    | Admit
    | Withdraw
    | Release
    | Submit
    | Cancel
    | Located
    | Loaded
    | Healthy
    | Granted
    | Refused
    | Answered
    | Failed
    | Reload
    | Drain
)

HEADER = Struct("<BI")  # the place in FORMATS, bytes that follow
FORMATS: dict[type[Message], str] = {  # of the fields; `text`, always the last, is what follows them
    Listening: "<",
    Ready: "<",
    Broken: "<",
    Admit: "<Q?",
    Withdraw: "<Q",
    Release: "<I",
    Submit: "<QIBI?Iqq",
    Cancel: "<Q",
    Located: "<",
    Loaded: "<I",
    Healthy: "<?",
    Granted: "<QI",
    Refused: "<Q",
    Answered: "<QQIqqI?",
    Failed: "<QB",
    Reload: "<",
    Drain: "<",
}


class _Codec(NamedTuple):
    number: int
    message: Any
    fields: Struct
    has_text: bool


_CODECS = [
    _Codec(number, message, Struct(fields), "text" in message._fields)
    for number, (message, fields) in enumerate(FORMATS.items())
]
_CODEC_OF: dict[type[Message], _Codec] = dict(zip(FORMATS, _CODECS, strict=True))


def encode(message: Message) -> bytes:
    """Return the message's bytes."""
    codec = _CODEC_OF[type(message)]
    fields: tuple[object, ...] = message
    text = str(fields[-1]).encode() if codec.has_text else b""
    body = codec.fields.pack(*(fields[:-1] if codec.has_text else fields)) + text
    return HEADER.pack(codec.number, len(body)) + body


def decode(data: bytearray) -> list[Message]:
    """Take the whole messages off the front of `data`; the beginning of one more may stay."""
    messages: list[Message] = []
    start = 0
    while len(data) - start >= HEADER.size:
        number, size = HEADER.unpack_from(data, start)
        body = start + HEADER.size
        if len(data) < body + size:
            break
        messages.append(_decode(_CODECS[number], data, body, body + size))
        start = body + size
    del data[:start]
    return messages


def _decode(codec: _Codec, data: bytearray, start: int, end: int) -> Message:
    fields = codec.fields.unpack_from(data, start)
    if codec.has_text:
        fields += (data[start + codec.fields.size : end].decode(),)
    message: Message = codec.message._make(fields)
    return message
