"""What goes into a session and what comes out of it: plain frozen values, no protobuf, no clock.

Everything about an attempt carries its number. A message of an attempt that is no longer the current one is
recognised by that number and dropped, however late it comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from runtime.errors import DiptychError


class Role(Enum):
    """The two kinds of worker that share one request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Cause(Enum):
    """Why an attempt ended without finishing the request."""

    INTERNAL = "internal"
    KV_TRANSFER_FAILED = "kv_transfer_failed"
    PEER_LOST = "peer_lost"  # one worker says that the other one is gone
    WORKER_LOST = "worker_lost"  # this gateway lost its link to a worker
    DRAINING = "draining"
    NEVER_FITS = "never_fits"
    DEADLINE = "deadline"
    INCOMPATIBLE = "incompatible"
    PREEMPTED = "preempted"  # the decode worker ran out of blocks


class FinishReason(Enum):
    """How a request ends well (status OK)."""

    STOP = "stop"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"  # by CancelRequest: the caller's own cancel ends the RPC instead


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """The bounded queue let the request through."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The answer to `ChooseRoute`."""

    prefill_id: str
    decode_id: str


@dataclass(frozen=True, slots=True)
class NoRoute:
    """The answer to `ChooseRoute` when no worker of this role can take the attempt."""

    role: Role


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """Tokens of the output from position ``index`` on. Positions count over all attempts."""

    attempt: int
    index: int
    token_ids: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class PrefillCommitted:
    """The prefill worker's last word: the decode worker has everything."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The decode worker's last word when the request is complete."""

    attempt: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The last word of the worker in ``role``: it cannot complete this attempt. Preemption comes here too."""

    attempt: int
    role: Role
    cause: Cause


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The link to this worker is down, and with it whatever it ran for this request."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string is complete after the first ``output_tokens`` tokens of the output."""

    output_tokens: int


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
    | TokensArrived
    | PrefillCommitted
    | DecodeFinished
    | AttemptFailed
    | WorkerGone
    | StopMatched
    | TimeLimitReached
    | DeadlinePassed
    | CancelAsked
    | ShuttingDown
    | ClientGone
    | Broken
)

# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChooseRoute:
    """Pick a prefill and a decode worker for these tokens; answer with `Routed` or `NoRoute`."""

    token_ids: tuple[int, ...] = field(repr=False)  # prompt, then what was delivered
    avoid: frozenset[str]  # workers that refused this request


@dataclass(frozen=True, slots=True)
class Attempt:
    """The work of one attempt, the same for both workers."""

    number: int  # 1, 2, …
    token_ids: tuple[int, ...] = field(repr=False)
    reserve_worst_case: bool
    choices: tuple[int, ...] = (0,)  # of the request that it computes, in order


@dataclass(frozen=True, slots=True)
class Attach:
    """Tell the decode worker to expect this attempt."""

    worker_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Tell the prefill worker to compute this attempt and hand it to ``decode_id``."""

    worker_id: str
    decode_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell a worker to drop an attempt that it may still be working on."""

    role: Role
    worker_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Emit:
    """New tokens for the client, each exactly once and in order."""

    index: int
    token_ids: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with this error."""

    error: DiptychError


Action = ChooseRoute | Attach | Dispatch | Cancel | Emit | Finish | Fail
