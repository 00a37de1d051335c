"""Log of the outages of a directory.

On a busy machine commands outlast our patience several times a minute, for a moment each. So a short outage
is told once a minute at most, and its end only if it was told itself.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError

_SAY_AGAIN_S = 60.0
_LONG_S = 5.0  # such an outage is told however lately there was another one


class OutageLog:
    """Outages that one client of the directory sees. Times are seconds on a clock that does not go back."""

    def __init__(self, url: str) -> None:
        self._directory = f"the directory at {without_login(url)}"
        self._answered = False  # ever
        self._began_at: float | None = None
        self._told = False  # the present one
        self._refused = False  # what was told last is that the login is
        self._told_at: float | None = None
        self._untold = 0

    def failed(self, error: Exception, now: float) -> str:
        """Call it at each failure: what to tell the log, empty for nothing."""
        if self._began_at is None:
            self._began_at = now
            self._untold += 1
        lately = self._told_at is not None and now - self._told_at < _SAY_AGAIN_S
        refused = isinstance(error, AuthenticationError)
        if self._told and refused and not self._refused:
            lately = self._told = False  # another outage: who was told to start one has
        if self._told or (lately and now - self._began_at < _LONG_S):
            return ""
        count, self._untold = self._untold, 0
        self._told, self._told_at, self._refused = True, now, refused
        return self._describe(error, count)

    def answered(self) -> bool:
        """Call it when the directory answers again: whether to tell the log."""
        tell = self._told or not self._answered
        self._answered = True
        self._began_at, self._told = None, False
        return tell

    def _describe(self, error: Exception, count: int) -> str:
        if isinstance(error, AuthenticationError):
            return f"{self._directory} refuses this login: give its password in DIPTYCH_REDIS_URL"
        often = f", {count} times since this was last said" if count > 1 else ""
        said = f"{self._directory} does not answer ({type(error).__name__}{often})"
        return said if self._answered else f"{said}: start one, or give --redis-url"


def without_login(url: str) -> str:
    """Return the URL of a Redis-protocol server as logs may have it: no name, no password, no options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
