"""The history of a request's attempts and its limits, from which the retry policy decides. Pure.

A request has one `RequestLimits`, with the `FailedWorkers` of all its choices; each choice has one
`AttemptHistory`. Workers are named by their ids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gateway.attempt.types import Cause, Role
from gateway.session.retry_policy import MAX_DEATHS, MOMENT_S, WORKER_WAIT_S, Retry, RetryBudget, RetryContext


@dataclass(slots=True)
class _Loss:
    """A worker that was lost at ``at`` seconds with an attempt that it had had since ``since``."""

    worker_id: str
    at: float
    since: float
    confirmed: bool = False


class _Suspect(NamedTuple):
    """A worker that had an attempt since ``since``, and was lost to others, or with others, at ``at``.

    ``until``: if this gateway loses it by then, it died with the attempt.
    """

    since: float
    at: float
    until: float


class FailedWorkers:
    """The workers that died under a request, as far as a gateway can know.

    A broken link proves nothing: the process may be dead, frozen, or cut off. It counts as a death,
    unconfirmed, until the same process is linked again. When another process takes its place, under its id or
    as one that names the worker it replaces, the death is confirmed. A worker that had announced its
    shutdown, drained and restarted by its operator, does not count. When only another worker reports that its
    link to the peer broke, the peer is a suspect: it counts once this gateway loses it, too. So is a prefill
    worker whose decode worker was lost first, for `MOMENT_S`: a pair may die in one moment.

    Deaths within `MOMENT_S` of each other, of workers that had the request when the first of them died, count
    once: a host that reboots or an operator that kills both is the likelier cause.
    """

    def __init__(self) -> None:
        self._losses: list[_Loss] = []  # by time; dead, unless they come back
        self._suspects: dict[str, _Suspect] = {}
        self.suspected_at = -math.inf
        """Time at which a suspect was last named: others may have been lost then, too."""

    @property
    def deaths(self) -> int:
        return len(self._moments())

    @property
    def unconfirmed(self) -> int:
        """Deaths that may turn out to be broken links."""
        return sum(not any(loss.confirmed for loss in moment) for moment in self._moments())

    @property
    def undecided(self) -> bool:
        """True if its deaths lie so close together that the request need not be their cause."""
        return not self._losses or self._losses[-1].at - self._losses[0].at <= MOMENT_S

    def _moments(self) -> list[list[_Loss]]:
        """Return the losses, grouped into those that count once."""
        moments: list[list[_Loss]] = []
        for loss in self._losses:
            first = moments[-1][0] if moments else None
            if first is not None and loss.since < first.at and loss.at - first.at <= MOMENT_S:
                moments[-1].append(loss)
            else:
                moments.append([loss])
        return moments

    def describe(self) -> list[str]:
        """Return the lost workers for the log, each with what is known of its death."""
        return [f"{x.worker_id} ({'dead' if x.confirmed else 'unconfirmed'})" for x in self._losses]

    def suspect(
        self, worker_id: str, *, since: float = 0.0, at: float = math.inf, within_s: float = math.inf
    ) -> None:
        """Record that a worker may have died with the request, ``at`` that time.

        If this gateway loses it within ``within_s`` seconds, it died at the earlier of both times.

        Args:
            since: when it got the attempt.
        """
        if at < math.inf:
            self.suspected_at = max(self.suspected_at, at)
        known = self._suspects.get(worker_id)
        if known is None or known.until <= at + within_s:
            self._suspects[worker_id] = _Suspect(since, at, at + within_s)

    @property
    def suspects(self) -> tuple[tuple[str, float], ...]:
        """Workers that may have died under the request, with the time, if one more death is one too many."""
        if self.deaths < MAX_DEATHS:
            return ()
        return tuple((worker_id, suspect.at) for worker_id, suspect in self._suspects.items())

    def is_suspect(self, worker_id: str, at: float = -math.inf) -> bool:
        """Return whether the worker counts as dead if this gateway loses it ``at`` that time."""
        suspect = self._suspects.get(worker_id)
        return suspect is not None and at <= suspect.until

    def worker_down(
        self, worker_id: str, *, graceful: bool, at: float = 0.0, since: float | None = None
    ) -> None:
        """Record that this gateway lost the worker while it had the request.

        Args:
            graceful: it had announced its shutdown.
            at: seconds on a monotonic clock.
            since: when it got the attempt; None = as recorded by `suspect`, or now.
        """
        suspect = self._suspects.pop(worker_id, None)
        if suspect is None or at > suspect.until:
            suspect = _Suspect(since=at, at=math.inf, until=math.inf)
        known = any(loss.worker_id == worker_id and not loss.confirmed for loss in self._losses)
        if not graceful and not known:
            loss = _Loss(worker_id, min(at, suspect.at), suspect.since if since is None else since)
            self._losses.append(loss)
            self._losses.sort(key=lambda known_loss: known_loss.at)

    def worker_up(self, worker_id: str, *, same_process: bool) -> None:
        """Record a link to the worker: to the same process, or to another in its place."""
        self._suspects.pop(worker_id, None)
        for loss in [loss for loss in self._losses if loss.worker_id == worker_id and not loss.confirmed]:
            loss.confirmed = not same_process
            if same_process:
                self._losses.remove(loss)


class RequestLimits:
    """The sizes and limits that all choices of a request share, and their common history.

    Args:
        max_tokens: of one choice.
        budget: the gateway's, to which retries after a fault are charged. None = no limit.
        wait_s: seconds that a choice without a worker waits for one to come; 0 = not at all.
        constrained: outputs follow a grammar.
    """

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        budget: RetryBudget | None = None,
        wait_s: float = WORKER_WAIT_S,
        constrained: bool = False,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.budget = budget
        self.wait_s = wait_s
        self._constrained = constrained
        self.delivered = 0  # tokens sent to the client, over all choices
        self.failed_workers = FailedWorkers()

    def ends_by_length(self, tokens: int) -> bool:
        """Return whether an output of ``tokens`` tokens is complete by its length alone.

        One that follows a grammar may be complete at its last token: only a worker knows.
        """
        return tokens >= self.max_tokens and not self._constrained


class AttemptHistory:
    """The history of one choice's attempts, and the needs of its next one.

    Attributes:
        failures: of its attempts, by cause.
        last_failure: why its last attempt ended; None before the second one.
        reserve, uncached: needs of its next attempt (see `gateway.attempt.work.Attempt`).
        remote: its next attempt needs a prefill worker; see `gateway.attempt.types.Cause.TOO_MANY_NEW`.
        suspended: it gets no worker before the deaths of those that it lost are confirmed or refuted.
        waits: for a worker that can take it, for a limited time.
        waiting_for: the role of which none could.
    """

    def __init__(self) -> None:
        self.failures: Counter[Cause] = Counter()
        self.last_failure: Cause | None = None
        self.reserve = False
        self.uncached = False
        self.remote = False
        self.suspended = False
        self.waits = False
        self.waiting_for: Role | None = None
        self._failures_since_progress: Counter[Cause] = Counter()
        self._hard_avoid: frozenset[str] = frozenset()  # workers that never get it again
        self._soft_avoid: frozenset[str] = frozenset()  # nor these, if others can take it

    @property
    def avoid(self) -> frozenset[str]:
        """Workers to which its next attempt should not go."""
        return self._hard_avoid | self._soft_avoid

    def context(self, limits: RequestLimits, attempts: int) -> RetryContext:
        """Return the input of the retry policy after ``attempts`` attempts."""
        recent = self._failures_since_progress
        return RetryContext(
            limits.prompt_tokens,
            limits.max_tokens,
            delivered=limits.delivered,
            preemptions=self.failures[Cause.PREEMPTED],
            transfer_failures=self.failures[Cause.KV_TRANSFER_FAILED],
            compute_failures=self.failures[Cause.COMPUTE_FAILED],
            deaths=limits.failed_workers.deaths,
            unconfirmed=limits.failed_workers.unconfirmed,
            undecided=limits.failed_workers.undecided,
            losses=recent[Cause.WORKER_LOST] + recent[Cause.PEER_LOST] + recent[Cause.ENCODER_LOST],
            refusals=recent[Cause.DRAINING],
            adapter_refusals=recent[Cause.ADAPTER_NOT_LOADED],
            attempts=attempts,
        )

    def record_failure(self, cause: Cause) -> None:
        """Record that an attempt ended early."""
        self.failures[cause] += 1
        self._failures_since_progress[cause] += 1
        self.last_failure = cause

    def made_progress(self) -> None:
        """Record that an attempt brought new tokens."""
        self._failures_since_progress.clear()

    def plan_retry(self, verdict: Retry, worker_id: str, pair: Iterable[str]) -> None:
        """Set the needs of the next attempt; ``worker_id`` is the worker of the ``pair`` that failed."""
        self.reserve = verdict.reserve_worst_case
        self.uncached = verdict.uncached
        self.suspended = not verdict.confirmed_safe
        if verdict.hard_avoid:
            self._hard_avoid |= {worker_id}
        soft = pair if verdict.soft_avoid_pair else {worker_id} if verdict.soft_avoid else ()
        self._soft_avoid = frozenset(soft)

    def clear_soft_avoid(self, worker_id: str | None) -> bool:
        """Allow a worker that failed, as no other can take the attempt; False if none was avoided softly.

        ``worker_id`` had the role for which no worker is left: if it was avoided, the other one stays so.
        """
        avoided = self._soft_avoid
        self._soft_avoid = avoided - {worker_id} if worker_id in avoided else frozenset()
        return bool(avoided)

    def allow_replacement(self, worker_id: str) -> None:
        """Allow a worker whose place another process has taken: that process has refused nothing yet."""
        self._hard_avoid -= {worker_id}
