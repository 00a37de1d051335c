"""What one choice went through, and what follows from it for the choice's next attempt. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gateway.attempt.types import Cause, Role
from gateway.session.request_limits import RequestLimits
from gateway.session.retry_policy import Retry, RetryContext


class AttemptHistory:
    """Of one choice.

    `failures`: of its attempts, by cause. `lost_by`: why its last one ended; None before the second one.
    `reserve`, `uncached`: what its next one needs (see `gateway.session.session_actions.Attempt`).
    `suspended`: it gets no worker before it is clear whether those that it lost are dead.
    `waits`: for a worker that may take it, for a limited time. `waiting_for`: the role of which none could.
    """

    def __init__(self) -> None:
        self.failures: Counter[Cause] = Counter()
        self.lost_by: Cause | None = None
        self.reserve = False
        self.uncached = False
        self.suspended = False
        self.waits = False
        self.waiting_for: Role | None = None
        self._fruitless: Counter[Cause] = Counter()  # failures since the last token
        self._refused: frozenset[str] = frozenset()  # workers that are not to have it again
        self._shunned: frozenset[str] = frozenset()  # nor these, if others can take it

    @property
    def avoid(self) -> frozenset[str]:
        """Workers that its next attempt should not go to."""
        return self._refused | self._shunned

    def history(self, tally: RequestLimits, attempts: int) -> RetryContext:
        """What `recovery` goes by, after ``attempts`` of them."""
        fruitless = self._fruitless
        return RetryContext(
            tally.prompt_tokens,
            tally.max_tokens,
            delivered=tally.delivered,
            preemptions=self.failures[Cause.PREEMPTED],
            transfer_failures=self.failures[Cause.KV_TRANSFER_FAILED],
            row_failures=self.failures[Cause.COMPUTE_FAILED],
            deaths=tally.casualties.deaths,
            unproven=tally.casualties.unproven,
            losses=fruitless[Cause.WORKER_LOST] + fruitless[Cause.PEER_LOST],
            refusals=fruitless[Cause.DRAINING],
            attempts=attempts,
        )

    def failed(self, cause: Cause) -> None:
        """Its attempt ended before its time."""
        self.failures[cause] += 1
        self._fruitless[cause] += 1
        self.lost_by = cause

    def got_on(self) -> None:
        """An attempt brought new tokens."""
        self._fruitless.clear()

    def follow(self, verdict: Retry, worker_id: str, pair: Iterable[str]) -> None:
        """It is to be tried again; ``worker_id`` is the worker of the ``pair`` that failed or refused it."""
        self.reserve = verdict.reserve_worst_case
        self.uncached = verdict.uncached
        self.suspended = not verdict.acquitted
        if verdict.avoid_worker:
            self._refused |= {worker_id}
        self._shunned = frozenset(pair if verdict.other_pair else {worker_id} if verdict.elsewhere else ())

    def forgive(self, worker_id: str | None) -> bool:
        """Nobody else can take it: better there than nowhere. False if nobody was shunned.

        ``worker_id`` had the role for which nobody is left: if it was shunned, the other one stays so.
        """
        shunned = self._shunned
        self._shunned = shunned - {worker_id} if worker_id in shunned else frozenset()
        return bool(shunned)

    def replaced(self, worker_id: str) -> None:
        """Another process has taken the worker's place: it has refused nothing yet."""
        self._refused -= {worker_id}
