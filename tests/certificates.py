"""Certificate authorities for tests, and the certificates that they issue, valid or expired."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM files."""

    certificate: Path
    key: Path

    def replace_by(self, other: Pair) -> None:
        """Replace both files, each atomically, by another certificate and key."""
        for mine, theirs in ((self.certificate, other.certificate), (self.key, other.key)):
            replace_file(mine, theirs.read_text())


class Authority:
    """A certificate authority whose files are in one folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        unsigned = (
            _unsigned(self._name, self._name, self._key, -DAY, DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
        )
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(_pem(unsigned.sign(self._key, hashes.SHA256())))

    def server(
        self, file: str = "server", *, names: Sequence[str] = ("localhost", "127.0.0.1"), expired: bool = False
    ) -> Pair:
        """Issue a certificate for a server with these host names or addresses."""
        return self._issue(file, "drafter", [_general_name(name) for name in names], expired)

    def client(self, common_name: str, *, uri: str | None = None, expired: bool = False) -> Pair:
        """Issue a certificate for a caller; uri: its subject alternative name."""
        alternatives = [] if uri is None else [x509.UniformResourceIdentifier(uri)]
        return self._issue(f"{common_name}{'-expired' if expired else ''}", common_name, alternatives, expired)

    def _issue(self, file: str, common_name: str, alternatives: list[x509.GeneralName], expired: bool) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        begin, end = (-2 * DAY, -DAY) if expired else (-DAY, DAY)
        unsigned = (
            _unsigned(subject, self._name, key, begin, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            # Python requires it from 3.13 on.
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if alternatives:
            unsigned = unsigned.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        pair = Pair(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        pair.certificate.write_bytes(_pem(unsigned.sign(self._key, hashes.SHA256())))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def encrypt_key(path: Path, password: bytes) -> None:
    """Encrypt a private key file with a password."""
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(password)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))


def replace_file(path: Path, text: str) -> None:
    """Replace the contents of a file atomically."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _unsigned(subject, issuer, key, begin, end) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begin)
        .not_valid_after(now + end)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
