"""Credentials of a client, an API key, and TLS.

The `diptych` commands take theirs from the environment:

    DIPTYCH_API_KEY            the key
    DIPTYCH_CA_FILE            PEM certificates to trust: turns TLS on (of public roots, the system's bundle)
    DIPTYCH_CLIENT_CERT_FILE   a client's own PEM certificate, for servers that want one,
    DIPTYCH_CLIENT_KEY_FILE    and its key
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

Metadata = tuple[tuple[str, str], ...]
Tls = bool | str | os.PathLike[str]
"""False: none. True: the public roots that gRPC knows. A path: PEM certificates to trust."""

_Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Access:
    """`credentials`: of a channel with TLS; None makes a plain one, over which a key goes in the clear."""

    api_key: str | None = field(default=None, repr=False)
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Strip the new line at the end of a key from a file, which no metadata may have.

        Raises ValueError for one that no metadata can carry: of a call gRPC would say "Invalid metadata".
        """
        key = (self.api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError("an API key has printable ASCII characters only")
        object.__setattr__(self, "api_key", key or None)

    @classmethod
    def from_environment(cls, api_key: str | None = None) -> "Access":
        """`api_key` stands in for its variable. Raises OSError for a file that cannot be read, and for files
        that are of no use without others; and ValueError for a key that is none.
        """
        ca_file = os.environ.get("DIPTYCH_CA_FILE")
        chain, key = (os.environ.get(f"DIPTYCH_CLIENT_{name}_FILE") for name in ("CERT", "KEY"))
        # The first would end the process in gRPC's core, with the second all would go in the clear.
        if bool(chain) != bool(key):
            raise OSError("DIPTYCH_CLIENT_CERT_FILE and DIPTYCH_CLIENT_KEY_FILE go together")
        if chain and not ca_file:
            raise OSError("DIPTYCH_CLIENT_CERT_FILE is of no use without DIPTYCH_CA_FILE, which turns TLS on")
        credentials = tls_credentials(ca_file, chain=chain, key=key) if ca_file else None
        return cls(api_key or os.environ.get("DIPTYCH_API_KEY"), credentials)

    @property
    def metadata(self) -> Metadata:
        """Metadata of each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def channel(self, address: str, options: _Options = ()) -> grpc.Channel:
        if self.credentials is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, self.credentials, options)

    def aio_channel(self, address: str, options: _Options = ()) -> grpc.aio.Channel:
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, self.credentials, options)


def tls_credentials(
    tls: Tls, *, chain: str | None = None, key: str | None = None
) -> grpc.ChannelCredentials | None:
    """None where `tls` is False. `chain` and `key` are files of the client's own certificate.

    Raises OSError for a file that cannot be read, ValueError for one of the two without the other.
    """
    if bool(chain) != bool(key):
        raise ValueError("chain and key go together")
    if tls is False:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=None if tls is True else Path(tls).read_bytes(),
        private_key=None if not key else Path(key).read_bytes(),
        certificate_chain=None if not chain else Path(chain).read_bytes(),
    )
