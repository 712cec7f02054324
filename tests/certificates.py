"""Certificates for tests: an authority, and what it has signed for 127.0.0.1."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


class Pair(NamedTuple):
    """PEM files of a certificate and its private key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates and writes them to `folder`; its own is the file `ca`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("authority")
        constraint = x509.BasicConstraints(ca=True, path_length=None)
        self.ca = _write(folder / "ca.pem", self._sign(self._name, self._key, constraint))

    def issue(self, name: str, key: PrivateKey | None = None) -> Pair:
        """A certificate for 127.0.0.1 and localhost, and its key."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")])
        cert = _write(self._folder / f"{name}.pem", self._sign(_name(name), key, names))
        return Pair(cert, _write(self._folder / f"{name}.key", private_bytes(key)))

    def _sign(self, name: x509.Name, key: PrivateKey, extension: x509.ExtensionType) -> bytes:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(hours=1),
            not_valid_after=now + timedelta(days=1),
        )
        return builder.add_extension(extension, critical=False).sign(self._key, SHA256()).public_bytes(Encoding.PEM)


def private_bytes(key: PrivateKey, password: bytes | None = None) -> bytes:
    """The key in PEM form, encrypted if there is a password."""
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
