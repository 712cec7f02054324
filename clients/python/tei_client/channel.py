"""How both clients reach a server: target, channel options, TLS, API key."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

Option = tuple[str, int | str]
Metadata = tuple[tuple[str, str], ...]

KEEPALIVE = 30.0  # seconds; a dead connection is noticed during a call, idle ones are left alone
KEEPALIVE_TIMEOUT_MS = 10_000
RECONNECT_MS = 5000  # at most between two attempts to connect; by gRPC's 120 s a server that restarts is long missed
NAMES = ("dns:", "ipv4:", "ipv6:")  # targets that can have several addresses
ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}})


@dataclass(frozen=True)
class TlsOptions:
    """PEM files: `ca` to verify the server (the system's when left out), `cert` and `key` to show who the client is."""

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("`cert` and `key` go together; give both or none")


def make_credentials(tls: TlsOptions) -> grpc.ChannelCredentials:
    """Read the files. Raises OSError when one cannot be read."""
    return grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))


def make_options(
    target: str, max_receive_message_size: int, options: Sequence[Option], keepalive: float = KEEPALIVE
) -> list[Option]:
    """Return gRPC's channel options: ours, overridden by the caller's.

    A `dns:///` target spreads calls over all addresses of the name, as a headless Kubernetes service has them, and
    leaves out servers whose health is NOT_SERVING: they still load, or are about to end.
    """
    defaults: Mapping[str, int | str] = {
        "grpc.max_receive_message_length": max_receive_message_size,
        "grpc.max_send_message_length": -1,
        "grpc.keepalive_time_ms": round(keepalive * 1000),
        "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_MS,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.max_reconnect_backoff_ms": RECONNECT_MS,
        **({"grpc.service_config": ROUND_ROBIN} if target.startswith(NAMES) else {}),
    }
    return list({**defaults, **dict(options)}.items())


def make_metadata(api_key: str | None) -> Metadata:
    """Return what every call carries."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
