"""Rules for the addresses of remote images: which URLs a caller may name, and which hosts are connected to.

Pure. A URL is read by a grammar of its own that is narrower than RFC 3986: two readers that disagree about
where the host ends are how such rules are evaded. A host is a name; addresses in any spelling, user
information and backslashes are refused. A name says nothing of where it leads, so that each address that it
resolves to is judged as well, and the connection goes to a judged address, not to the name once more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final
from urllib.parse import urljoin

LONGEST_URL: Final = 8192
_PORTS: Final = {"http": 80, "https": 443}
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?"
_NAME: Final = rf"(?:{_LABEL}\.){{0,126}}[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?"
"""A host by name: the last label begins with a letter, as in no spelling of an address."""
_URL: Final = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{_NAME})(?::(?P<port>[0-9]{{1,5}}))?"
    r"(?P<path>[/?][!$-;=?-\[\]_a-z~]*)?(?:#[!-~]*)?",
    re.IGNORECASE | re.ASCII,
)
_ENTRY: Final = re.compile(rf"(?P<below>\*\.)?(?P<host>{_NAME})(?::(?P<port>[0-9]{{1,5}}))?", re.IGNORECASE)
_UNICAST6: Final = IPv6Network("2000::/3")
_TUNNELS: Final = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""Networks within it that lead elsewhere or nowhere: Teredo and protocols, documentation, 6to4."""
_SPECIAL4: Final = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
"""Addresses outside the private networks that are no host of the Internet: IETF protocols, 6to4 relays, and
the one at which Azure's machines reach their own host.
"""


class RefusedUrl(Exception):
    """A URL that is not fetched; the message follows the name of its field."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that may be fetched, in its parts."""

    scheme: str
    host: str
    port: int
    path: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """Host as a request's `Host` header has it."""
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Entry:
    host: str
    below: bool
    port: int | None

    def takes(self, target: Target) -> bool:
        if target.port != (self.port or _PORTS[target.scheme]):
            return False
        return target.host.endswith(f".{self.host}") if self.below else target.host == self.host


class UrlRules:
    """List of hosts whose images are fetched: `*`, `HOST`, `*.HOST` (all below it), each but the first with
    `:PORT` where that is not its scheme's.
    """

    def __init__(self, entries: tuple[str, ...]) -> None:
        """Read the list. Raises ValueError, naming the entry."""
        self._any = "*" in entries
        self._entries = tuple(_entry(one) for one in entries if one != "*")

    def target(self, url: str) -> Target:
        """Return the parts of an allowed URL. Raises RefusedUrl."""
        found = _URL.fullmatch(url) if len(url) <= LONGEST_URL else None
        if found is None:
            raise RefusedUrl(
                f"must be an http(s) URL with a host's name, percent-encoded, of {LONGEST_URL} bytes at most"
            )
        scheme, path = found["scheme"].lower(), found["path"] or "/"
        port = int(found["port"]) if found["port"] else _PORTS[scheme]
        target = Target(scheme, found["host"].lower(), port, path if path[0] == "/" else f"/{path}")
        if not (self._any and port == _PORTS[scheme]) and not any(one.takes(target) for one in self._entries):
            raise RefusedUrl("names a host, or a port, that this server fetches no images from")
        return target

    def redirected(self, target: Target, location: str) -> Target:
        """Return where a redirect leads: the same host, and never from https to http. Raises RefusedUrl."""
        base = f"{target.scheme}://{target.authority}{target.path}"
        try:
            found = self.target(urljoin(base, location))
        except ValueError:
            raise RefusedUrl("leads to another URL that cannot be read") from None
        if found.host != target.host or (target.scheme == "https" and found.scheme == "http"):
            raise RefusedUrl("leads to another host: redirects are followed within one only")
        return found


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is that of a host of the Internet (IANA's special-purpose registries).

    Addresses that hold another one (mapped, translated, tunnelled) are none, whatever they hold.
    """
    if isinstance(address, IPv4Address):
        special = any(address in network for network in _SPECIAL4)
        return address.is_global and not (address.is_multicast or address.is_reserved or special)
    tunnel = any(address in network for network in _TUNNELS)
    return address in _UNICAST6 and address.is_global and not tunnel


def _entry(text: str) -> _Entry:
    found = _ENTRY.fullmatch(text)
    port = None if found is None or found["port"] is None else int(found["port"])
    if found is None or (port is not None and not 0 < port < 65536):
        raise ValueError(
            f"{text}: must be *, a host's name, *.NAME for all below it, or one of these with :PORT"
        )
    return _Entry(found["host"].lower(), found["below"] is not None, port)
