"""Log of the outages of a directory.

On a busy machine commands outlast our patience several times a minute, for a moment each. So a short outage
is told once a minute at most, and its end only if it was told itself.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    ExecAbortError,
    MasterDownError,
    MaxConnectionsError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

_CODES = {
    "OOM": (
        "has no memory left for writes",
        "raise its maxmemory, or set a maxmemory-policy that evicts",
    ),
    "NOPERM": (
        "forbids this login a command or a key",
        "let its ACL have ~diptych:* +@read +@write +@transaction",
    ),
    "READONLY": ("is a read-only replica", "give the address of the primary in DIPTYCH_REDIS_URL"),
    "MISCONF": (
        "takes no writes because it cannot save its data",
        "mend its disk, or set stop-writes-on-bgsave-error no: nothing here has to be saved",
    ),
    "LOADING": ("still reads its data", "wait, or let it start without a dump: nothing here has to be kept"),
    "MASTERDOWN": (
        "is a replica without its primary",
        "give the address of the primary in DIPTYCH_REDIS_URL",
    ),
    "NOREPLICAS": ("takes no writes for it has too few replicas", "lower its min-replicas-to-write"),
    "CLUSTERDOWN": ("is a cluster that is down", "give the address of a server without cluster mode"),
    "MOVED": ("is a cluster", "give the address of a server without cluster mode"),
    "CROSSSLOT": ("is a cluster", "give the address of a server without cluster mode"),
    "WRONGTYPE": ("has other data under diptych: keys", "give Diptych a database of its own, as redis://…/1"),
    "MAXCLIENTS": ("has no connection left", "raise its maxclients"),
    "NOAUTH": ("refuses this login", "give its password in DIPTYCH_REDIS_URL"),
}
"""Cause that a server's error reply names, and its operator's remedy; by the error's code."""

_CODE_OF = {
    OutOfMemoryError: "OOM",
    NoPermissionError: "NOPERM",
    ReadOnlyError: "READONLY",
    BusyLoadingError: "LOADING",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
    ClusterCrossSlotError: "CROSSSLOT",
    MovedError: "MOVED",
}
"""Classes that leave the code out of their message."""

_SAY_AGAIN_S = 60.0
_LONG_S = 5.0  # such an outage is told however lately there was another one


class OutageLog:
    """Outages that one client of the directory sees. Times are seconds on a clock that does not go back."""

    def __init__(self, url: str) -> None:
        self._directory = f"the directory at {without_login(url)}"
        self._answered = False  # ever
        self._began_at: float | None = None
        self._told = False  # the present one
        self._told_code = ""  # of the error that was told last
        self._code = ""
        self._told_at: float | None = None
        self._untold = 0

    def failed(self, error: Exception, now: float) -> str:
        """Call it at each failure: what to tell the log, empty for nothing."""
        if self._began_at is None:
            self._began_at = now
            self._untold += 1
        lately = self._told_at is not None and now - self._told_at < _SAY_AGAIN_S
        code = self._code = error_code(error)
        if self._told and code and code != self._told_code:
            lately = self._told = False  # another outage, with another remedy
        if self._told or (lately and now - self._began_at < _LONG_S):
            return ""
        count, self._untold = self._untold, 0
        self._told, self._told_at, self._told_code = True, now, code
        return self._describe(error, count)

    def answered(self) -> bool:
        """Call it when the directory answers again: whether to tell the log."""
        tell = self._told or not self._answered
        self._answered = True
        self._began_at, self._told, self._code = None, False, ""
        return tell

    @property
    def cause(self) -> str:
        """The cause of the present outage in a few words, for operators; empty without one."""
        if self._began_at is None:
            return ""
        return f"{self._directory} {_CODES[self._code][0] if self._code in _CODES else 'does not answer'}"

    def _describe(self, error: Exception, count: int) -> str:
        if (cause := error_cause(error)) is not None:
            return f"{self._directory} {cause[0]}: {cause[1]}"
        if isinstance(error, ResponseError):
            return f"{self._directory} answers with an error: {str(error)[:200]!r}"
        often = f", {count} times since this was last said" if count > 1 else ""
        said = f"{self._directory} does not answer ({type(error).__name__}{often})"
        return said if self._answered else f"{said}: start one, or give --redis-url"


def error_code(error: Exception) -> str:
    """Return the code of a server's error reply, such as OOM; empty for other errors."""
    if isinstance(error, AuthenticationError):
        return "NOAUTH"
    if isinstance(error, MaxConnectionsError) or "max number of clients" in str(error):
        return "MAXCLIENTS"
    for kind, code in _CODE_OF.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, ExecAbortError | ResponseError):
        return next((code for code in _CODES if _mentions(error, code)), type(error).__name__)
    return ""


def error_cause(error: Exception) -> tuple[str, str] | None:
    """Return the cause of a server's error reply and its remedy; None where neither is known."""
    return _CODES.get(error_code(error))


def _mentions(error: Exception, *words: str) -> bool:
    return any(re.search(rf"\b{word}\b", str(error)) for word in words)


def without_login(url: str) -> str:
    """Return the URL of a Redis-protocol server as logs may have it: no name, no password, no options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
