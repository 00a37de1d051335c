"""Private certificate authority for links between programs: of a folder, or of one run of `diptych up`."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diptych.cli.stack import ROLES
from diptych.cli.stack_options import AUTO_TLS, StackOptions
from diptych.runtime.internal_tls import AUTHORITY, CERTIFICATE, KEY, name_of

AUTHORITY_KEY = "ca.key"
DAYS, AUTHORITY_DAYS = 90, 3650
_SKEW = datetime.timedelta(minutes=5)
"""Age of a fresh certificate: the clock of another host may be behind."""


class BadAuthority(ValueError):
    """Files of an authority that cannot be used; says which and why."""


class PrivateCa:
    """Certificate authority: its certificate, and the key that signs."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate, self.key = certificate, key

    @classmethod
    def fresh(cls, days: int = AUTHORITY_DAYS) -> PrivateCa:
        """Make an authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Diptych private CA")])
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            _dated(name, name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, folder: Path) -> PrivateCa:
        """Read ca.crt and ca.key. Raises BadAuthority."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
            key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise BadAuthority(f"{folder}: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise BadAuthority(f"{folder}: {AUTHORITY_KEY} is not the key of {AUTHORITY}")
        return cls(certificate, key)

    def write(self, folder: Path) -> None:
        """Write ca.crt, and ca.key for the next renewal."""
        _write(folder / AUTHORITY, _pem(self.certificate))
        _write(folder / AUTHORITY_KEY, _pem_key(self.key), secret=True)

    def issue(self, folder: Path, roles: Sequence[str], days: int = DAYS) -> None:
        """Write the three files of a program in these roles, each in place of the one before."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name_of(roles[0]))])
        names = x509.SubjectAlternativeName([x509.DNSName(name_of(role)) for role in roles])
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        leaf = (
            _dated(name, self.certificate.subject, key.public_key(), days)
            .add_extension(names, critical=False)
            .add_extension(uses, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(signer, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / AUTHORITY, _pem(self.certificate))
        _write(folder / KEY, _pem_key(key), secret=True)
        _write(folder / CERTIFICATE, _pem(leaf))


@contextlib.contextmanager
def with_certificates(options: StackOptions) -> Iterator[StackOptions]:
    """Yield the options with a folder of certificates where they ask for fresh ones; it goes at the end.

    The authority's key is dropped at once: no other program of this system can be signed.
    """
    if options.internal_tls != AUTO_TLS:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="diptych-tls-") as folder:  # mode 0700
        authority = PrivateCa.fresh()
        for role in ROLES:
            authority.issue(Path(folder, role), [role], AUTHORITY_DAYS)
        yield replace(options, internal_tls=folder)


def _dated(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Replace a file in one step; a secret one is readable for its owner alone from the start."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    fresh.rename(path)
