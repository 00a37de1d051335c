"""What a conversation has around it: the workers it speaks to, and how far it may go to keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.worker.v1 import work_pb2
from gateway.attempt.types import Role
from gateway.attempt.work import Job
from gateway.session.retry_budget import RetryBudget
from gateway.session.retry_policy import WAIT_FOR_WORKER_S
from gateway.worker_pool.placement import Placement
from gateway.worker_pool.router import NoWorker, RouteRequest


class Workers(Protocol):
    """The fleet, as a conversation sees it. Sending never blocks; it raises `LinkDown`."""

    def place(self, request: RouteRequest, job: Job, token_ids: tuple[int, ...]) -> Placement | NoWorker: ...
    def attach(self, worker_id: str, work: work_pb2.Work) -> None: ...
    def dispatch(self, worker_id: str, decode_id: str, work: work_pb2.Work) -> None: ...
    def cancel(
        self, role: Role, worker_id: str, work_id: str, attempt: int, choices: Sequence[int]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """One choice of a route: when (monotonic seconds), and what came of it; None when there was no worker."""

    start: float
    end: float
    placement: Placement | None


@dataclass(frozen=True, slots=True)
class Recovery:
    """How far the gateway goes for a request that lost its worker; see `gateway.session.request_limits.RequestLimits`."""

    budget: RetryBudget | None = None
    wait_s: float = WAIT_FOR_WORKER_S
