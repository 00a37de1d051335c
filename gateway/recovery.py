"""What to do when an attempt ends without finishing its request: try again, or give up with which error.

One pure function over the cause and what the request has been through. A new way to recover (another worker
after a death, say) is a new rule here; the session that asks does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.session_events import Cause
from runtime.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DiptychError,
    Draining,
    Internal,
    KvTransferFailed,
    NoReadyWorker,
    NothingAllowed,
    WorkerLost,
)

TRANSFER_FAILURES_RECOMPUTED = 1  # a second corrupt hand-over is no accident
REFUSALS_REROUTED = 3  # workers that were draining when the request reached them
PREEMPTIONS_BEFORE_RESERVE = 2  # from then on a grant needs room for the worst case


@dataclass(frozen=True, slots=True)
class History:
    """What a request has been through, the failure at hand included."""

    prompt_tokens: int
    max_tokens: int
    delivered: int = 0  # output tokens the client has
    preemptions: int = 0
    transfer_failures: int = 0
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class Retry:
    """Prefill prompt plus delivered tokens again and continue at the next index."""

    reserve_worst_case: bool = False
    avoid_worker: bool = False  # do not route to the worker that failed


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the request with this error."""

    error: DiptychError


def decide(cause: Cause, history: History, *, phase: str) -> Retry | GiveUp:
    """The rule for ``cause``; ``phase`` names where the request was, for the deadline's error."""
    reserve = history.preemptions >= PREEMPTIONS_BEFORE_RESERVE
    match cause:
        case Cause.PREEMPTED:
            return Retry(reserve_worst_case=reserve)
        case Cause.KV_TRANSFER_FAILED:
            if history.transfer_failures <= TRANSFER_FAILURES_RECOMPUTED:
                return Retry(reserve_worst_case=reserve)
            return GiveUp(KvTransferFailed(tokens_emitted=history.delivered))
        case Cause.DRAINING:
            if history.refusals <= REFUSALS_REROUTED:
                return Retry(reserve_worst_case=reserve, avoid_worker=True)
            return GiveUp(_lost_unless(history, Draining()))
        case Cause.PEER_LOST | Cause.WORKER_LOST:
            return GiveUp(WorkerLost(tokens_emitted=history.delivered))
        case Cause.NEVER_FITS:
            return GiveUp(_never_fits(history))
        case Cause.DEADLINE:
            return GiveUp(DeadlineExceeded(phase))
        case Cause.INCOMPATIBLE:
            return GiveUp(_lost_unless(history, NoReadyWorker("decode")))
        case Cause.NOTHING_ALLOWED:
            return GiveUp(NothingAllowed())
        case Cause.INTERNAL:
            return GiveUp(Internal())


def no_route(role: str, history: History) -> DiptychError:
    """No worker can take the (next) attempt: replayable only while nothing was delivered."""
    return _lost_unless(history, NoReadyWorker(role))


def shutting_down(history: History) -> DiptychError:
    """This gateway cannot finish the request any more."""
    return _lost_unless(history, Draining())


def _lost_unless(history: History, error: DiptychError) -> DiptychError:
    """UNAVAILABLE promises that nothing was delivered; once something was, the answer is ABORTED."""
    return WorkerLost(tokens_emitted=history.delivered) if history.delivered else error


def _never_fits(history: History) -> DiptychError:
    if history.delivered:
        return WorkerLost(tokens_emitted=history.delivered)
    total = history.prompt_tokens + history.max_tokens
    return ContextLengthExceeded(history.prompt_tokens, history.max_tokens, total - 1)
