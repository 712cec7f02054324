"""Certificates: read and checked at start, so that a wrong file is named then and not by every handshake."""

import ssl
from pathlib import Path

import grpc

from tei_grpc.errors import StartupError


def read_credentials(cert: Path | None, key: Path | None, client_ca: Path | None) -> grpc.ServerCredentials | None:
    """Return what encrypted ports need, from PEM files; None when none are given.

    `cert` holds the server's certificate, then those between it and its authority. With `client_ca`, only clients that
    show a certificate of one of its authorities are let in. Raises StartupError, naming the option and the file.
    """
    if cert is None or key is None:
        return None
    certificates = _read_certificates(cert, "--tls-cert")
    pair = _read_key(key, cert), certificates
    if client_ca is None:
        return grpc.ssl_server_credentials([pair])
    authorities = _read_certificates(client_ca, "--tls-client-ca")
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=True)


def _read_certificates(path: Path, option: str) -> bytes:
    content = _read(path, option)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise StartupError(f"`{option}`: {str(path)!r} holds no certificate in PEM form") from None
    return content


def _read_key(path: Path, cert: Path) -> bytes:
    """Read the private key of the certificate in `cert`, which is known to be sound."""
    content = _read(path, "--tls-key")
    try:
        # the empty password keeps OpenSSL from asking the terminal for one
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, path, password="")
    except ssl.SSLError as error:
        raise StartupError(_explain(error, path, cert)) from None
    return content


def _explain(error: ssl.SSLError, key: Path, cert: Path) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"`--tls-key`: {str(key)!r} is not the key of `--tls-cert` {str(cert)!r}"
    if not error.reason:  # OpenSSL has no more to say of a file that it cannot read
        return f"`--tls-key`: {str(key)!r} holds no unencrypted private key in PEM form"
    return f"`--tls-cert`: {str(cert)!r} is refused: {error.reason.replace('_', ' ').lower()}"


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"`{option}`: cannot read {str(path)!r} ({error.strerror})") from None
