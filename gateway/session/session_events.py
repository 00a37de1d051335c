"""What goes into a session: plain frozen values, no protobuf, no clock. What comes out is in session_actions.

Everything about an attempt carries its number. A message of an attempt that is no longer the current one is
recognised by that number and dropped, however late it comes. What concerns one choice of a request carries
its index; everything else concerns all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.runtime.errors import DiptychError
from gateway.attempt.types import FinishReason, Role
from gateway.attempt.worker_events import WorkerEvent


@dataclass(frozen=True, slots=True)
class Admitted:
    """The bounded queue let the request through."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The answer to `ChooseRoute`."""

    prefill_id: str
    decode_id: str
    choices: tuple[int, ...] = (0,)  # those that were asked for


@dataclass(frozen=True, slots=True)
class NoRoute:
    """The answer to `ChooseRoute` when no worker of this role can take the attempt."""

    role: Role
    choices: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Launched:
    """A choice is part of attempt ``attempt`` from now on."""

    attempt: int
    prefill_id: str
    decode_id: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The link to this worker is down, and with it whatever it ran for this request."""

    worker_id: str
    left: bool = False  # it had said that it would go, or it never had the request: nobody's fault


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A link to a worker is up. ``returned``: it is the very process that was gone, so it had not died. Else
    another one is in its place, which may have an id of its own.
    """

    worker_id: str
    returned: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """Before anything else: the client has these tokens of a choice already, from a stream that broke.

    ``reason`` is set when they are all that there is; only the word that it is complete was lost.
    """

    token_ids: tuple[int, ...] = field(repr=False)
    choice: int = 0
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The time of an `AwaitWorker` is up; ``attempt`` as it was named there."""

    choice: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string is complete after the first ``output_tokens`` tokens of a choice's output."""

    output_tokens: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class TimeLimitReached:
    """The request's soft limit: it finishes with what it has."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline of the gRPC call."""


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Somebody called CancelRequest: it finishes with what it has."""


@dataclass(frozen=True, slots=True)
class ShuttingDown:
    """This gateway ends, and the grace for running requests is over."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The caller cancelled or vanished: nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The gateway itself failed on this request (a bug): end it, and let nothing leak."""

    error: DiptychError


Event = (
    Admitted
    | Routed
    | NoRoute
    | Launched
    | WorkerEvent
    | WorkerGone
    | WorkerUp
    | Restored
    | WaitOver
    | StopMatched
    | TimeLimitReached
    | DeadlinePassed
    | CancelAsked
    | ShuttingDown
    | ClientGone
    | Broken
)
