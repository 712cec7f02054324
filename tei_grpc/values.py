"""The values that options take: their types, what is checked of each, and what is said about wrong ones."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from tei_grpc.errors import StartupError

MAX_PORT = 65535
MAX_AGE = 2_000_000  # seconds; gRPC counts milliseconds in 32 bits


def _check_ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        raise ValueError("must be an IP address, like 0.0.0.0 or ::1") from None


def _check_device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", text):
        raise ValueError("must be auto, cpu, cuda, cuda:N or mps")
    return text


def _check_message_size(size: int) -> int:
    if size == 0:
        raise ValueError("must be positive, or -1 for no limit")
    return size


def _check_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text or not text.isascii() or not text.isprintable():
        raise ValueError("must be a non-empty key of printable ASCII; leave it out to serve without a key")
    return key


def _check_address(text: str) -> str:
    match = re.fullmatch(r"unix:.+|(\[[^\]]+\]|[^:\[]+):([0-9]{1,5})", text)
    if match is None or int(match[2] or 0) > MAX_PORT:
        raise ValueError("must be HOST:PORT, [HOST]:PORT or unix:PATH")
    if match[1]:
        _check_ip(match[1])
    return text


def _check_url(text: str) -> str:
    if not re.fullmatch(r"https?://[^/\s@]+/?", text):
        raise ValueError("must be a URL like http://HOST:4317, or https:// for an encrypted connection")
    return text


def _none_if_empty(value: object) -> object:
    return None if value == "" else value


def _split(value: object) -> object:
    return tuple(value.split(",")) if isinstance(value, str) else value


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Count = Annotated[int, Field(gt=0, lt=2**32)]
Frontends = Annotated[int, Field(ge=0, le=128)]
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
Device = Annotated[str, AfterValidator(_check_device)]
IpLiteral = Annotated[str, AfterValidator(_check_ip)]
MessageSize = Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_check_message_size)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Age = Annotated[float, Field(ge=0.001, le=MAX_AGE)]
AgeGrace = Annotated[float, Field(ge=0, le=MAX_AGE)]
ApiKey = Annotated[SecretStr, AfterValidator(_check_key)]
HubToken = Annotated[SecretStr | None, BeforeValidator(_none_if_empty)]
CollectorUrl = Annotated[str, AfterValidator(_check_url)]
ListenAddresses = Annotated[tuple[Annotated[str, AfterValidator(_check_address)], ...], BeforeValidator(_split)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in the file of `--api-key-file`, one a line. Raises StartupError, which shows none of them."""
    option = "`--api-key-file` (API_KEY_FILE)"
    try:
        keys = tuple(filter(None, (line.strip() for line in path.read_text(encoding="utf-8").splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{option}: cannot read {str(path)!r}: {type(error).__name__}") from None
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        raise StartupError(f"{option}: {str(path)!r} must hold keys of printable ASCII, one a line")
    return keys
