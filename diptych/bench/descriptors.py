"""As many connections as the system lets us have."""

from __future__ import annotations

import contextlib
import resource


def allow_descriptors() -> None:
    """Logins begin with 1,024 open files. By HTTP each request in flight has a connection of its own: beyond
    that many would fail here, and look like failures of the server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
