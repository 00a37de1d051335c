"""What to do when an attempt ends without finishing its request: try again, or give up with which error.

One pure function over the cause and what the request has been through. A new way to recover is a new rule
here; the session that asks does not change.

Three limits hold a request that nothing helps:

- deaths: workers that died under it. A second one makes it the suspect: no third worker gets it, and it ends
  when both deaths are proven, or when nothing was heard for as long as it may wait. A worker that said it
  would go, or that comes back, has not died.
- losses and refusals since its last token: while it gets on, operators may restart workers as they like.
- the gateway's `RetryBudget`, for what costs a prefill because of a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.runtime.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DiptychError,
    Draining,
    Internal,
    KvTransferFailed,
    NoReadyWorker,
    NoValidToken,
    ShutDown,
    WorkerLost,
)
from gateway.attempt.types import Cause

TRANSFER_FAILURES_RECOMPUTED = 1  # a second corrupt handoff is no accident
ROW_FAILURES_RECOMPUTED = 1  # nor is a second step that gives it no token
DEATHS_SURVIVED = 1
LOSSES_RECOVERED = 8  # without a token between them: the way to the workers is no good
REFUSALS_REROUTED = 3  # likewise: workers that were draining when the request reached them
PREEMPTIONS_BEFORE_RESERVE = 2  # from then on a grant needs room for the worst case
WAIT_FOR_WORKER_S = 60.0  # a supervisor has a dead worker back in a few seconds, one that hangs in forty-five


@dataclass(frozen=True, slots=True)
class RetryContext:
    """What a request has been through, the failure at hand included."""

    prompt_tokens: int
    max_tokens: int
    delivered: int = 0  # output tokens the client has
    preemptions: int = 0
    transfer_failures: int = 0
    row_failures: int = 0
    deaths: int = 0  # of workers that had it
    unproven: int = 0  # of these, the ones that may be a broken link only
    losses: int = 0  # of workers and of the way to them, since its last token
    refusals: int = 0  # since its last token
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Retry:
    """Prefill prompt plus delivered tokens again and continue at the next index."""

    reserve_worst_case: bool = False
    avoid_worker: bool = False  # do not route to the worker that refused
    elsewhere: bool = False  # nor to the one that failed, if there is another
    other_pair: bool = False  # nor to any of the two: what failed is the way between them, or either end
    uncached: bool = False  # compute all of it anew
    fault: bool = True  # its prefill is to be paid from the retry budget
    acquitted: bool = True  # else only once a worker that seems to have died under it is back


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the request with this error."""

    error: DiptychError


@dataclass(frozen=True, slots=True)
class Wait:
    """Stay for so long, should a worker come."""

    seconds: float


def decide(cause: Cause, history: RetryContext, *, phase: str) -> Retry | GiveUp:
    """The rule for ``cause``; ``phase`` names where the request was, for the deadline's error."""
    reserve = history.preemptions >= PREEMPTIONS_BEFORE_RESERVE
    match cause:
        case Cause.PREEMPTED:
            return Retry(reserve, fault=False)
        case Cause.KV_TRANSFER_FAILED:
            if history.transfer_failures <= TRANSFER_FAILURES_RECOMPUTED:
                return Retry(reserve, other_pair=True)
            return GiveUp(KvTransferFailed(tokens_emitted=history.delivered))
        case Cause.DRAINING:
            if history.refusals <= REFUSALS_REROUTED:
                return Retry(reserve, avoid_worker=True, fault=False)
            return GiveUp(_lost_unless(history, Draining()))
        case Cause.PEER_LOST | Cause.WORKER_LOST:
            return _lost(cause, history, reserve)
        case Cause.COMPUTE_FAILED:
            if history.row_failures <= ROW_FAILURES_RECOMPUTED:
                return Retry(reserve, elsewhere=True, uncached=True)
            return GiveUp(Internal())
        case Cause.EXCEEDS_KV_CAPACITY:
            return GiveUp(_exceeds_kv_capacity(history))
        case Cause.DEADLINE:
            return GiveUp(DeadlineExceeded(phase))
        case Cause.INCOMPATIBLE:
            return GiveUp(_lost_unless(history, NoReadyWorker("decode")))
        case Cause.NO_VALID_TOKEN:
            return GiveUp(NoValidToken())
        case Cause.INTERNAL:
            return GiveUp(Internal())


def suspect(history: RetryContext) -> bool:
    """Whether so many workers seem to have died under it that it must not get another one now."""
    return history.deaths > DEATHS_SURVIVED


def poisonous(history: RetryContext) -> bool:
    """Whether so many are known to have died under it that it never gets another one."""
    return history.deaths - history.unproven > DEATHS_SURVIVED


def no_route(role: str, history: RetryContext, wait_s: float = WAIT_FOR_WORKER_S) -> Wait | GiveUp:
    """No worker can take the (next) attempt. Who has had one may wait for a worker to come back."""
    return Wait(wait_s) if history.attempts and wait_s else GiveUp(nobody_came(role, history))


def nobody_came(role: str, history: RetryContext) -> DiptychError:
    """No worker took it: replayable only while nothing was delivered."""
    return _lost_unless(history, NoReadyWorker(role))


def over_budget(history: RetryContext, retry_after_s: float) -> DiptychError:
    """Too much is being repeated already."""
    return WorkerLost(tokens_emitted=history.delivered, retry_after_s=retry_after_s)


def shutting_down(history: RetryContext) -> DiptychError:
    """This gateway cannot finish the request any more."""
    return ShutDown(tokens_emitted=history.delivered) if history.delivered else Draining()


def _lost(cause: Cause, history: RetryContext, reserve: bool) -> Retry | GiveUp:
    if poisonous(history):
        return GiveUp(Internal())
    if history.losses > LOSSES_RECOVERED:
        return GiveUp(WorkerLost(tokens_emitted=history.delivered))
    return Retry(reserve, elsewhere=cause is Cause.PEER_LOST, acquitted=not suspect(history))


def _lost_unless(history: RetryContext, error: DiptychError) -> DiptychError:
    """UNAVAILABLE promises that nothing was delivered; once something was, the answer is ABORTED."""
    return WorkerLost(tokens_emitted=history.delivered) if history.delivered else error


def _exceeds_kv_capacity(history: RetryContext) -> DiptychError:
    if history.delivered:
        return WorkerLost(tokens_emitted=history.delivered)
    total = history.prompt_tokens + history.max_tokens
    return ContextLengthExceeded(history.prompt_tokens, history.max_tokens, total - 1)
