"""TLS for the ports that clients reach: one certificate, read again when it is renewed.

Both kinds of port ask at each new connection whether the files are other ones now, so that a renewal needs no
restart and drops no client. Files that do not fit together (a certificate is there and its key not yet) are
said in the log, again each minute, and the ones of before stay until they do.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import grpc

from diptych.runtime.file_watch import FileWatch, readable_by_all
from diptych.runtime.startup_error import StartupError

_ALPN: Final = ["http/1.1"]  # of the HTTP port; gRPC says h2 itself
T = TypeVar("T")
_log = logging.getLogger(__name__)


class BadTlsFiles(StartupError, ValueError):
    """The files cannot be served with; says which one and why."""


def require_readable(path: Path) -> None:
    """Raises `BadTlsFiles`."""
    try:
        path.read_bytes()
    except OSError as error:
        raise BadTlsFiles(f"cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True)
class TlsFiles:
    """PEM files.

    Args:
        certificate: of the server, and after it those between it and a root.
        key: of the certificate, without a passphrase, and readable by no other user.
        client_ca: certificates that sign those of clients; None: clients need none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Raises `BadTlsFiles`."""
        self._context()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC port.

        With ``client_ca`` a client without a certificate gets no connection.
        """
        watch = self._watch()

        def current() -> grpc.ServerCertificateConfiguration | None:
            return self._when_changed(watch, self._configuration)

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            current,  # type: ignore[arg-type]  # None is allowed: nothing new
            require_client_authentication=self.client_ca is not None,
        )

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context of the HTTP port.

        With ``client_ca`` the certificate of a client is checked where it sends one.
        """
        watch, current = self._watch(), self._context()

        def at_each_handshake(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            nonlocal current
            current = self._when_changed(watch, self._context) or current
            connection.context = current

        context = self._context()
        context.sni_callback = at_each_handshake
        return context

    def _watch(self) -> FileWatch:
        return FileWatch(*self._all)

    @property
    def _all(self) -> tuple[Path, ...]:
        return (self.certificate, self.key, *([self.client_ca] if self.client_ca is not None else []))

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        self.check()
        chain = self.key.read_bytes(), self.certificate.read_bytes()
        roots = None if self.client_ca is None else self.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([chain], root_certificates=roots)

    def _context(self) -> ssl.SSLContext:
        for path in self._all:
            require_readable(path)
        if readable_by_all(self.key):
            raise BadTlsFiles(f"{self.key} can be read by every user of this machine: chmod o-r {self.key}")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_ALPN)
        try:
            # An empty passphrase, or OpenSSL would ask the terminal for one.
            context.load_cert_chain(self.certificate, self.key, password="")
        except ssl.SSLError:
            raise BadTlsFiles(
                f"{self.certificate} and {self.key} are not a certificate and its key (PEM, no passphrase)"
            ) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError:
                raise BadTlsFiles(f"{self.client_ca} has no certificate in PEM") from None
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def _when_changed(self, watch: FileWatch, read: Callable[[], T]) -> T | None:
        if not watch.changed():
            return None
        try:
            fresh = read()
        except (BadTlsFiles, OSError) as error:
            if watch.failed(str(error)):
                _log.error("the certificate stays as it was: %s", error)
            return None
        _log.info("the certificate was read again")
        return fresh
