"""Mutual TLS between gateways and workers: a folder of PEM files a program, read again when renewed.

The folder has the names of a Kubernetes TLS secret, as cert-manager writes it: `tls.crt`, `tls.key` and
`ca.crt`, the roots that sign every program's certificate. A certificate says by a DNS name what its owner is:
`gateway.diptych.internal`, `prefill.diptych.internal`, `decode.diptych.internal` or
`encode.diptych.internal`. Addresses do not count: those of pods are not known when a certificate is signed.
The connecting end demands the role that serves the method, the serving end the role that may call it.

Files are looked at for each new connection. Connections that stand stay: they are as old as their streams.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from diptych.runtime.file_watch import FileWatch
from diptych.runtime.tls import BadTlsFiles, TlsFiles

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
_DOMAIN: Final = ".diptych.internal"
_EXPLAINED: Final = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not one that our ca.crt signed for this role",
    "WRONG_VERSION_NUMBER": "it answers without TLS: it lacks --internal-tls",
    "TLSV1_ALERT_UNKNOWN_CA": "it refuses our certificate, which its ca.crt has not signed",
    "CERTIFICATE_REQUIRED": "it wants a certificate",
    "Hostname Verification": "its certificate is that of another role",
}
_log = logging.getLogger(__name__)


class NotTrusted(Exception):
    """A peer whose certificate is not that of the role which the connection is for."""


def name_of(role: str) -> str:
    """Return the DNS name of a role, which a certificate has whose owner is in that role."""
    return role + _DOMAIN


def require_role(names: Iterable[str], role: str) -> None:
    """Check the DNS names of a verified certificate. Raises NotTrusted, with the names that it has."""
    found = sorted(names)
    if name_of(role) not in found:
        raise NotTrusted(f"its certificate names {', '.join(found) or 'nothing'}, and not {name_of(role)}")


def names_in(connection: ssl.SSLObject | ssl.SSLSocket) -> list[str]:
    """Return the DNS names of the peer's verified certificate."""
    certificate: Any = connection.getpeercert() or {}
    return [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]


def explain_handshake(details: str) -> str | None:
    """Return in words why a handshake failed, by gRPC's details; None if they tell of no handshake."""
    why = next((text for sign, text in _EXPLAINED.items() if sign in details), None)
    if why is None and "handshake failed" not in details.lower():
        return None
    return f"the TLS handshake failed: {why or details}"


@dataclass(frozen=True)
class _Material:
    """Files that fit together, as bytes for gRPC and as contexts for sockets."""

    certificate: bytes
    key: bytes
    authority: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return what a gRPC port serves with."""
        chain = self.key, self.certificate
        return grpc.ssl_server_certificate_configuration([chain], root_certificates=self.authority)


class InternalTls:
    """Certificates of one program for its links to others.

    Args:
        folder: has tls.crt, tls.key and ca.crt.
        role: of this program: gateway, prefill, decode or encode.
        plain_groups: whether nccl and gloo, which do not encrypt, may carry keys and values to other hosts.
    """

    def __init__(self, folder: Path, role: str, *, plain_groups: bool = False) -> None:
        """Read the files. Raises BadTlsFiles."""
        self.role, self.plain_groups = role, plain_groups
        self.http = TlsFiles(folder / CERTIFICATE, folder / KEY)
        """The files of a port for probes and metrics, whose callers have no certificate."""
        self._authority = folder / AUTHORITY
        self._watch = FileWatch(self.http.certificate, self.http.key, self._authority)
        self._material = self._read()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC port; who has no certificate of the CA gets no connection."""
        served = self._current()

        def fresh() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            if (now := self._current()) is served:
                return None
            served = now
            return now.configuration

        return grpc.dynamic_ssl_server_credentials(
            served.configuration,
            fresh,  # type: ignore[arg-type]  # None is allowed: nothing new
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of one new channel, with the files of now."""
        now = self._current()
        return grpc.ssl_channel_credentials(now.authority, now.key, now.certificate)

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a listening socket, which demands a certificate of the CA."""

        def at_each_handshake(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            connection.context = self._current().server

        context = _server_context(self.http, self._current().authority)
        context.sni_callback = at_each_handshake
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the context of one new connection, with the files of now."""
        return self._current().client

    def _current(self) -> _Material:
        """Return the files of now, or those of before where no peer would take them; any thread may ask."""
        if self._watch.changed():
            try:
                self._material = self._read()
                _log.info("the certificate of links was read again")
            except BadTlsFiles as error:
                if self._watch.failed(str(error)):
                    _log.error("the certificate of links stays as it was: %s", error)
        return self._material

    def _read(self) -> _Material:
        """Read files that fit together. Raises BadTlsFiles."""
        before = self._bytes()
        self.http.check()
        certificate, key, authority = before
        try:
            server, client = _server_context(self.http, authority), _client_context(self.http, authority)
        except (ssl.SSLError, ValueError) as error:
            raise BadTlsFiles(f"{self._authority} has no certificate in PEM: {error}") from None
        _check_against_itself(self.http, server, client, self.role)
        if self._bytes() != before:
            raise BadTlsFiles(f"{self.http.certificate} and the files beside it are being replaced")
        return _Material(certificate, key, authority, server, client)

    def _bytes(self) -> tuple[bytes, bytes, bytes]:
        paths = self.http.certificate, self.http.key, self._authority
        try:
            certificate, key, authority = (path.read_bytes() for path in paths)
        except OSError as error:
            raise BadTlsFiles(f"cannot read {error.filename}: {error.strerror}") from None
        return certificate, key, authority


def _server_context(files: TlsFiles, authority: bytes) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.decode())
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key, password="")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _client_context(files: TlsFiles, authority: bytes) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.decode())
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key, password="")
    return context


def _check_against_itself(files: TlsFiles, server: ssl.SSLContext, client: ssl.SSLContext, role: str) -> None:
    """Shake hands with these files on both ends: the CA, the dates and the name are checked as a peer would.

    Raises BadTlsFiles.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name_of(role)),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    pending = list(ends)
    try:
        for _ in range(8):  # flights of a handshake
            for end in tuple(pending):
                try:
                    end.do_handshake()
                    pending.remove(end)
                except ssl.SSLWantReadError:
                    pass
        require_role(names_in(ends[1]), role)
    except ssl.SSLCertVerificationError as error:
        raise BadTlsFiles(f"{files.certificate}: no peer would take it: {error.verify_message}") from None
    except (ssl.SSLError, NotTrusted, ValueError) as error:
        raise BadTlsFiles(f"{files.certificate}: no peer would take it: {error}") from None
