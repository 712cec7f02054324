"""What an operator should hear at start: what is served, and what surprises later."""

import logging
from collections.abc import Sequence

from tei_grpc.config import ServerConfig
from tei_grpc.pb import tei_pb2
from tei_grpc.runtime.listeners import Address, Addresses, is_local
from tei_grpc.types import Info

logger = logging.getLogger(__name__)

CLIENT_LIMIT = 4 * 2**20  # bytes; gRPC clients refuse larger messages unless told otherwise


def announce_listening(addresses: Addresses, config: ServerConfig, *, has_keys: bool) -> None:
    """Say where the server is, before it has a model; warn if it is open to everybody, or to whoever listens in."""
    logger.info("Listening on %s, loading the model", _join(addresses.serving))
    if addresses.health:
        logger.info("Answering health checks on %s", _join(addresses.health))
    if config.tls_cert is None:
        warn_if_open(addresses.serving, has_keys=has_keys)


def announce_serving(addresses: Addresses, config: ServerConfig, info: Info, *, has_keys: bool) -> None:
    """Say what is served, and how to try it."""
    note_large_replies(info, config.max_send_message_size)
    example = _example(addresses.serving[0].local, config, with_key=has_keys)
    logger.info("Serving on %s. Try: %s", _join(addresses.serving), example, extra=describe(info))


def warn_if_open(addresses: Sequence[Address], *, has_keys: bool) -> None:
    """Warn if other machines can reach the addresses of a server without TLS."""
    reachable = ", ".join(address.bound for address in addresses if not is_local(address))
    if reachable and has_keys:
        logger.warning("Keys and inputs travel to %s as they are, unencrypted: see `--tls-cert`", reachable)
    elif reachable:
        logger.warning("Everybody who can reach %s is served, unencrypted: see `--api-key` and `--tls-cert`", reachable)


def describe(info: Info) -> dict[str, object]:
    """Return what is served and how, as fields of a log line. Of prompts only the names are told."""
    fields: dict[str, object] = {
        "model_id": info.model_id,
        "model_sha": info.model_sha,
        "kind": str(info.model_type),
        "pooling": [str(pooling) for pooling in info.pooling],
        "modules": list(info.modules),
        "prompts": sorted(info.prompts),
        "dtype": info.model_dtype,
        "device": info.device,
        "path": "packed" if info.optimized else "generic",
        "kernels": info.kernels,
    }
    limits = ("concurrent_requests", "input_length", "batch_tokens", "batch_requests", "client_batch_size")
    return fields | {f"max_{limit}": getattr(info, f"max_{limit}") for limit in limits}


def note_large_replies(info: Info, max_send_message_size: int) -> None:
    """Say if the EmbedAll reply of the longest input is too large for usual clients, or to be sent at all."""
    size = largest_reply(info)
    text = "EmbedAll of the longest input is a reply of %d bytes; "
    if -1 < max_send_message_size < size:
        logger.warning(text + "`--max-send-message-size` is %d bytes", size, max_send_message_size)
    elif size > CLIENT_LIMIT:
        logger.info(text + "clients accept %d unless they raise `grpc.max_receive_message_length`", size, CLIENT_LIMIT)


def largest_reply(info: Info) -> int:
    """Return the bytes of the largest EmbedAll reply, but for its metadata; 0 if the model answers no EmbedAll."""
    if not info.embeds_all:
        return 0
    token = tei_pb2.TokenEmbedding(embeddings=[0.0] * info.hidden_size)
    return info.max_input_length * tei_pb2.EmbedAllResponse(token_embeddings=[token]).ByteSize()


def _join(addresses: Sequence[Address]) -> str:
    return ", ".join(address.bound for address in addresses)


def _example(address: str, config: ServerConfig, *, with_key: bool) -> str:
    """Return a command to try the server with."""
    where, trust = address, "-plaintext"
    if address.startswith("unix:"):
        where = f"-unix {address.removeprefix('unix:')}"
    elif config.tls_cert is not None:
        trust = "-cacert CA.pem" + (" -cert CERT.pem -key KEY.pem" if config.tls_client_ca is not None else "")
    key = " -H 'authorization: Bearer KEY'" if with_key else ""
    return f"""grpcurl -d '{{"inputs": "What is Deep Learning"}}' {trust}{key} {where} tei.v1.Embed/Embed"""
