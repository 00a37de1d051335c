"""Events of a supervisor about its processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Loading:
    """A process was started and is not ready yet."""

    name: str


@dataclass(frozen=True)
class Serving:
    """A process announced itself, `seconds` after its start."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Ended:
    """A process ended unasked, or never became ready; it starts again in `restart_in_s` seconds.

    `reason` goes on where the name ends: "ended: killed by SIGKILL".
    """

    name: str
    reason: str
    restart_in_s: float


@dataclass(frozen=True)
class ChangedRole:
    """A worker ended to be started again in another role, as the process `now`."""

    name: str
    now: str
    role: str


@dataclass(frozen=True)
class Wrote:
    """A process wrote a line."""

    name: str
    line: str


@dataclass(frozen=True)
class Replaced:
    """A process has a successor that serves, and is to end."""

    name: str


@dataclass(frozen=True)
class Removed:
    """A process was ended for good."""

    name: str


@dataclass(frozen=True)
class Stopping:
    """Every process is to end; `requests` that run (None: unknown) may finish for `grace_s`."""

    requests: int | None
    grace_s: float


@dataclass(frozen=True)
class Stale:
    """The ready file could not be changed: it no longer says how things are."""

    path: str
    reason: str


Event = Loading | Serving | Ended | ChangedRole | Wrote | Replaced | Removed | Stopping | Stale
