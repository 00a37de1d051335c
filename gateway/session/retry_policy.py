"""The retry policy: whether an attempt that ended early is retried, or its request ends with which error.

Pure functions over the cause and the request's history. A new way to recover is a new rule here; the state
machine that asks does not change. Time is an argument, in seconds on a monotonic clock.

Three limits hold a request that no retry helps:

- deaths: workers that died under it after they had begun with it. A second one quarantines the request: no
  third worker gets it, and it ends when both deaths are confirmed, or when the time to wait for a worker is
  over. A worker that announced its shutdown, or that comes back, has not died. Deaths in one moment count
  once (`gateway.session.attempt_history.FailedWorkers`). Where two deaths are so close together that chance
  may have been their cause, a request with output ends with ABORTED, and not as the culprit.
- losses and refusals since its last token: while it makes progress, operators may restart workers at will.
- the gateway's `RetryBudget`, for each prefill that a fault makes necessary.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from diptych.runtime.errors import (
    AdapterNotLoaded,
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
from gateway.worker_pool.arrival_wait import FIRST_WAIT_S

MAX_TRANSFER_FAILURES: Final = 1  # a second corrupt handoff is no accident
MAX_COMPUTE_FAILURES: Final = 1  # nor is a second step that gives it no token
MAX_DEATHS: Final = 1
MOMENT_S: Final = 1.0  # deaths that lie no further apart may have one cause: a host, an OOM killer, a drain
MAX_LOSSES: Final = 8  # without a token between them: the network to the workers is faulty
MAX_REFUSALS: Final = 3  # likewise: workers that were draining when the request reached them
PREEMPTIONS_BEFORE_RESERVE: Final = 2  # from then on a grant needs room for the worst case
WORKER_WAIT_S: Final = 60.0  # a supervisor restarts a dead worker in a few seconds, a hung one in forty-five
BUDGET_FRACTION: Final = 0.2
BUDGET_WINDOW_S: Final = 10.0
BUDGET_SLICES: Final = 20  # of a window; it moves by one of them at a time


@dataclass(frozen=True, slots=True)
class RetryContext:
    """The history of a request, the failure at hand included."""

    prompt_tokens: int
    max_tokens: int
    delivered: int = 0  # output tokens that the client has
    preemptions: int = 0
    transfer_failures: int = 0
    compute_failures: int = 0
    deaths: int = 0  # of workers that had the request
    unconfirmed: int = 0  # deaths that may turn out to be broken links
    undecided: bool = False  # all deaths lie within `MOMENT_S`
    losses: int = 0  # of workers and of the network to them, since its last token
    refusals: int = 0  # since its last token
    adapter_refusals: int = 0  # likewise, by workers that did not have its adapter
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Retry:
    """A new attempt: prefill the prompt and the delivered tokens, and continue at the next index."""

    reserve_worst_case: bool = False
    hard_avoid: bool = False  # never route to the worker that refused
    soft_avoid: bool = False  # nor to the one that failed, if there is another
    soft_avoid_pair: bool = False  # nor to any of the two: the fault is in either, or between them
    uncached: bool = False  # read nothing from the prefix cache
    charged: bool = True  # to the retry budget
    confirmed_safe: bool = True  # else it waits until a worker that seems to have died under it is back


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The end of the request with this error."""

    error: DiptychError


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of so many seconds for a worker."""

    seconds: float


def decide(cause: Cause, context: RetryContext, *, phase: str) -> Retry | GiveUp:
    """Return the verdict on an attempt that ended with ``cause``; ``phase`` is for the deadline's error."""
    reserve = context.preemptions >= PREEMPTIONS_BEFORE_RESERVE
    match cause:
        case Cause.PREEMPTED:
            return Retry(reserve, charged=False)
        case Cause.KV_TRANSFER_FAILED:
            if context.transfer_failures <= MAX_TRANSFER_FAILURES:
                return Retry(reserve, soft_avoid_pair=True)
            return GiveUp(KvTransferFailed(tokens_emitted=context.delivered))
        case Cause.DRAINING:
            if context.refusals <= MAX_REFUSALS:
                return Retry(reserve, hard_avoid=True, charged=False)
            return GiveUp(_aborted_or(Draining(), context))
        case Cause.PEER_LOST | Cause.WORKER_LOST | Cause.ENCODER_LOST:
            return _decide_loss(cause, context, reserve)
        case Cause.COMPUTE_FAILED:
            if context.compute_failures <= MAX_COMPUTE_FAILURES:
                return Retry(reserve, soft_avoid=True, uncached=True)
            return GiveUp(Internal("a worker could not compute it, and another one neither"))
        case Cause.EXCEEDS_KV_CAPACITY:
            return GiveUp(_exceeds_kv_capacity(context))
        case Cause.DEADLINE:
            return GiveUp(DeadlineExceeded(phase))
        case Cause.INCOMPATIBLE:
            return GiveUp(_aborted_or(NoReadyWorker("decode"), context))
        case Cause.NO_VALID_TOKEN:
            return GiveUp(NoValidToken())
        case Cause.ADAPTER_NOT_LOADED:  # the next attempt goes where it is by then
            if context.adapter_refusals <= MAX_REFUSALS:
                return Retry(reserve, charged=False)
            return GiveUp(AdapterNotLoaded(tokens_emitted=context.delivered))
        case Cause.TOO_MANY_NEW:  # an answer, which no attempt is charged for
            return Retry(reserve, charged=False)
        case Cause.INTERNAL:
            return GiveUp(Internal("a worker failed on it; that worker's log has the details"))


def quarantined(context: RetryContext) -> bool:
    """Return whether more workers seem to have died under the request than it may have another one after."""
    return context.deaths > MAX_DEATHS


def poison_request(context: RetryContext) -> bool:
    """Return whether so many deaths are confirmed that the request never gets another worker."""
    return context.deaths - context.unconfirmed > MAX_DEATHS


def quarantine_error(context: RetryContext) -> DiptychError:
    """Return the error of a request under which more workers died than it may have another one after."""
    if context.undecided and context.delivered:
        return WorkerLost(tokens_emitted=context.delivered)
    unconfirmed = f", {context.unconfirmed} of the deaths unconfirmed" if context.unconfirmed else ""
    return Internal(f"{context.deaths} workers died under it{unconfirmed}")


def wait_or_give_up(role: str, context: RetryContext, wait_s: float = WORKER_WAIT_S) -> Wait | GiveUp:
    """Return the verdict when no worker of ``role`` can take the next attempt; the first one waits briefly.

    A worker was there when the request arrived (`gateway.worker_pool.arrival_wait`), and may be back soon.
    """
    if not wait_s:
        return GiveUp(no_worker_error(role, context))
    return Wait(wait_s if context.attempts else min(wait_s, FIRST_WAIT_S))


def no_worker_error(role: str, context: RetryContext) -> DiptychError:
    """Return the error of a request for which no worker came: safe to replay while nothing was delivered."""
    return _aborted_or(NoReadyWorker(role), context)


def over_budget_error(context: RetryContext, retry_after_s: float) -> DiptychError:
    """Return the error of a request whose retry the gateway's budget does not cover."""
    return WorkerLost(tokens_emitted=context.delivered, retry_after_s=retry_after_s)


def shutting_down_error(context: RetryContext) -> DiptychError:
    """Return the error of a request that outlived the gateway's shutdown timeout."""
    return ShutDown(tokens_emitted=context.delivered) if context.delivered else Draining()


def _decide_loss(cause: Cause, context: RetryContext, reserve: bool) -> Retry | GiveUp:
    if poison_request(context):
        return GiveUp(quarantine_error(context))
    if context.losses > MAX_LOSSES:
        return GiveUp(WorkerLost(tokens_emitted=context.delivered))
    return Retry(reserve, soft_avoid=cause is not Cause.WORKER_LOST, confirmed_safe=not quarantined(context))


def _aborted_or(error: DiptychError, context: RetryContext) -> DiptychError:
    """Return ``error``, or ABORTED once tokens were delivered: UNAVAILABLE promises that none were."""
    return WorkerLost(tokens_emitted=context.delivered) if context.delivered else error


def _exceeds_kv_capacity(context: RetryContext) -> DiptychError:
    if context.delivered:
        return WorkerLost(tokens_emitted=context.delivered)
    total = context.prompt_tokens + context.max_tokens
    return ContextLengthExceeded(context.prompt_tokens, context.max_tokens, total - 1)


class RetryBudget:
    """The gateway's budget of retries: so many sequences may be prefilled again in a window after a fault.

    A retry repeats work. While the workers are well that is little; when they die one after the other, the
    survivors would do nothing but the prompts of the dead. The budget bounds it: within a window a fraction
    of the sequences that arrived in the same time, or ``floor`` if that is more. With a floor as large as the
    number of running requests, the loss of all workers can be recovered once a window.

    Args:
        floor: sequences that may always be prefilled again within a window, at least 1.
        fraction: of the sequences that arrived within a window.
    """

    def __init__(
        self, floor: int, *, fraction: float = BUDGET_FRACTION, window_s: float = BUDGET_WINDOW_S
    ) -> None:
        self._floor = floor
        self._fraction = fraction
        self._slice_s = window_s / BUDGET_SLICES
        self._arrivals = _SlidingCount()
        self._retries = _SlidingCount()

    def record_arrival(self, sequences: int, now: float) -> None:
        """Count the sequences of an admitted request."""
        self._arrivals.add(sequences, self._slice(now))

    def try_spend(self, now: float) -> bool:
        """Count the retry of one sequence; False, and nothing is counted, when the budget is spent."""
        number = self._slice(now)
        if self._retries.total(number) >= self._limit(number):
            return False
        self._retries.add(1, number)
        return True

    def wait_s(self, now: float) -> float:
        """Return the seconds until one sequence may be retried, if no other is; 0 when it may be now."""
        number = self._slice(now)
        excess = self._retries.total(number) - math.ceil(self._limit(number)) + 1
        if excess <= 0:
            return 0.0
        return (self._retries.slice_of(excess) + BUDGET_SLICES) * self._slice_s - now

    def _slice(self, now: float) -> int:
        return int(now / self._slice_s)

    def _limit(self, number: int) -> float:
        return max(self._floor, self._fraction * self._arrivals.total(number))


class _SlidingCount:
    """Counts by slice of time, over the last `BUDGET_SLICES` slices."""

    def __init__(self) -> None:
        self._slices: deque[list[int]] = deque()  # [number, count], oldest first
        self._total = 0

    def add(self, count: int, number: int) -> None:
        if self._slices and self._slices[-1][0] == number:
            self._slices[-1][1] += count
        else:
            self._slices.append([number, count])
        self._total += count

    def total(self, number: int) -> int:
        while self._slices and self._slices[0][0] <= number - BUDGET_SLICES:
            self._total -= self._slices.popleft()[1]
        return self._total

    def slice_of(self, count: int) -> int:
        """Return the slice with which the oldest ``count`` of the counted leave the window."""
        for number, here in self._slices:
            count -= here
            if count <= 0:
                return number
        raise ValueError("more than were counted")


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """The gateway's limits on recovery from lost workers; see `RequestLimits`."""

    budget: RetryBudget | None = None
    wait_s: float = WORKER_WAIT_S
