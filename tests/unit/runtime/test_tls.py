import ssl

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tei_grpc.errors import StartupError
from tei_grpc.runtime.tls import read_certificates
from tests.certificates import Authority, private_bytes


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority):
    return authority.issue("server")


def refusal(*files):
    with pytest.raises(StartupError) as caught:
        read_certificates(*files)
    return caught.value.message


def test_no_files_mean_no_certificates():
    assert read_certificates(None, None, None) is None


def test_sound_files_are_read(authority, pair):
    assert read_certificates(pair.cert, pair.key, None) is not None
    assert read_certificates(pair.cert, pair.key, authority.ca) is not None


@pytest.mark.parametrize(("place", "option"), [(0, "--tls-cert"), (1, "--tls-key"), (2, "--tls-client-ca")])
def test_file_that_is_not_there_is_refused_by_option_and_name(authority, pair, tmp_path, place, option):
    files = [pair.cert, pair.key, authority.ca]
    files[place] = tmp_path / "none.pem"
    assert refusal(*files) == f"`{option}`: cannot read '{files[place]}' (No such file or directory)"


@pytest.mark.parametrize(
    ("place", "option", "what"),
    [
        (0, "--tls-cert", "certificate"),
        (1, "--tls-key", "unencrypted private key"),
        (2, "--tls-client-ca", "certificate"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"text", b"\xff\x00", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_file_without_pem_is_refused_by_option_and_name(authority, pair, tmp_path, place, option, what, content):
    files = [pair.cert, pair.key, authority.ca]
    files[place] = tmp_path / "wrong.pem"
    files[place].write_bytes(content)
    assert refusal(*files) == f"`{option}`: '{files[place]}' holds no {what} in PEM form"


def test_key_of_another_certificate_is_refused(authority, pair):
    other = authority.issue("other")
    assert (
        refusal(pair.cert, other.key, None)
        == f"`--tls-key`: '{other.key}' is not the key of `--tls-cert` '{pair.cert}'"
    )


def test_swapped_files_are_refused(pair):
    assert refusal(pair.key, pair.cert, None) == f"`--tls-cert`: '{pair.key}' holds no certificate in PEM form"


def test_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(pair, tmp_path):
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(private_bytes(ec.generate_private_key(ec.SECP256R1()), b"SESAME"))
    assert (
        refusal(pair.cert, encrypted, None)
        == f"`--tls-key`: '{encrypted}' holds no unencrypted private key in PEM form"
    )


@pytest.mark.skipif(ssl.create_default_context().security_level < 2, reason="this OpenSSL takes weak keys")
def test_certificate_with_a_weak_key_is_refused_with_the_reason(authority):
    weak = authority.issue("weak", rsa.generate_private_key(65537, 1024))
    assert refusal(weak.cert, weak.key, None) == f"`--tls-cert`: '{weak.cert}' is refused: ee key too small"
