"""Certificates: read and checked at start and at each reload, so that a wrong file is named then, not by handshakes."""

import ssl
from pathlib import Path

import grpc

from tei_grpc.errors import StartupError


class Certificates:
    """What encrypted ports show and trust, from PEM files that can be read anew while connections last.

    `cert` holds the server's certificate, then those between it and its authority. With `client_ca`, only clients that
    show a certificate of one of its authorities are let in.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Raises StartupError, naming the option and the file."""
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self.reload()

    def reload(self) -> None:
        """Read the files; handshakes from now on go by them. Raises StartupError, and then nothing has changed."""
        authorities = None if self._client_ca is None else _read_certificates(self._client_ca, "--tls-client-ca")
        chain = _read_certificates(self._cert, "--tls-cert")
        pair = _read_key(self._key, self._cert), chain
        self._current = grpc.ssl_server_certificate_configuration([pair], authorities)

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of one port; each has its own, because gRPC asks for every port what is new."""
        given = self._current

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """What a handshake is to go by, None: as before. gRPC calls this in threads of its own."""
            nonlocal given
            if given is self._current:
                return None
            given = self._current
            return given

        needs_client = self._client_ca is not None
        return grpc.dynamic_ssl_server_credentials(given, fetch, needs_client)  # type: ignore[arg-type] # None is fine


def read_certificates(cert: Path | None, key: Path | None, client_ca: Path | None) -> Certificates | None:
    """Return what encrypted ports need; None when no files are given. Raises StartupError as `Certificates` does."""
    return None if cert is None or key is None else Certificates(cert, key, client_ca)


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
