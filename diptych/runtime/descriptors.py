"""The open files of a process, and how many connections its ports may take of them.

A port that takes connections until none is left silences all others: probes, links to workers, logs. So each
has a bound, and all of them together leave a reserve.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from typing import Final

RESERVED: Final = 64  # links to workers, listening sockets, pools, files
HTTP: Final = 1024
GRPC: Final = 1024  # of each gRPC port
ADMIN: Final = 64
SPARE: Final = 64  # HTTP connections beyond the bound, for one request each: probes are answered there
LEAST: Final = 8  # of each, however few descriptors there are
NEEDED: Final = RESERVED + HTTP + SPARE + GRPC + ADMIN


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The most connections that each port takes."""

    http: int = HTTP
    spare: int = SPARE
    grpc: int = GRPC
    admin: int = ADMIN

    @property
    def constrained(self) -> bool:
        """True where there are fewer descriptors than the usual bounds need."""
        return self.grpc < GRPC


def raise_descriptor_limit() -> None:
    """Raise the limit on open files as far as the system lets us.

    Logins and systemd begin with 1,024, which so many idle connections use up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limits(descriptors: int | None = None) -> ConnectionLimits:
    """Return the bounds for so many descriptors; None = as many as this process may open."""
    if descriptors is None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors >= NEEDED or descriptors == resource.RLIM_INFINITY:
        return ConnectionLimits()
    share = max(descriptors - RESERVED, 0) / (NEEDED - RESERVED)
    bounds = (max(int(bound * share), LEAST) for bound in (HTTP, SPARE, GRPC, ADMIN))
    return ConnectionLimits(*bounds)


def shortage() -> str:
    """Return a warning where this process may open fewer files than its ports need; empty otherwise."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = connection_limits(descriptors)
    if not limits.constrained:
        return ""
    return (
        f"only {descriptors} open files are allowed (ulimit -n, LimitNOFILE): at most {limits.http} HTTP and "
        f"{limits.grpc} gRPC connections at once; {NEEDED} files would do for {HTTP} of each"
    )
