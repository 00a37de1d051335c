"""Placement of a request's attempts: the question to the worker pool, and the event that its answer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.runtime.errors import AdapterNotLoaded
from diptych.worker.v1 import work_pb2
from gateway.attempt.types import EncoderRoute, Role
from gateway.attempt.work import Job
from gateway.model.images import PromptImages
from gateway.session.events import ChooseRoute, Event, NoRoute, ProofPending, RequestFailed, Routed
from gateway.session.request_state import RequestState
from gateway.worker_pool.router import NoAdapter, NoProof, NoWorker, Placement, RouteRequest


class Workers(Protocol):
    """The worker pool as a driver uses it. Sending never blocks; it raises `LinkDown`."""

    def place_attempt(
        self, request: RouteRequest, job: Job, token_ids: tuple[int, ...]
    ) -> Placement | NoWorker | NoProof | NoAdapter: ...
    def attach_attempt(self, worker_id: str, work: work_pb2.Work) -> None: ...
    def dispatch_attempt(
        self,
        worker_id: str,
        decode_id: str,
        work: work_pb2.Work,
        images: PromptImages | None = None,
        encoder: EncoderRoute | None = None,
    ) -> None: ...
    def encode_attempt(self, worker_id: str, work: work_pb2.Work, images: PromptImages) -> None: ...
    def cancel_attempt(
        self, role: Role, worker_id: str, work_id: str, attempt: int, choices: Sequence[int]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """The start and end of one route decision (monotonic seconds), and its result; None without a worker."""

    start: float
    end: float
    placement: Placement | None


class Placements:
    """The route decisions of one request.

    Attributes:
        traces: of all decisions that looked for workers, in order.
        namespaces: of the block keys of the decode workers that were chosen.
    """

    def __init__(self, job: Job, workers: Workers, clock: Callable[[], float]) -> None:
        self._job = job
        self._workers = workers
        self._clock = clock
        self.traces: list[RouteTrace] = []
        self.namespaces: dict[str, bytes] = {}

    def choose(self, wanted: ChooseRoute, state: RequestState) -> Event:
        """Ask for the workers of an attempt; return what came of it."""
        start = self._clock()
        placement = self._workers.place_attempt(
            route_request(self._job, wanted, state), self._job, wanted.token_ids
        )
        if isinstance(placement, NoProof):
            return ProofPending(wanted.choices)
        if isinstance(placement, NoAdapter):
            return RequestFailed(AdapterNotLoaded(tokens_emitted=state.limits.delivered))
        if isinstance(placement, NoWorker):
            self.traces.append(RouteTrace(start, self._clock(), None))
            return NoRoute(placement.role, wanted.choices)
        self.traces.append(RouteTrace(start, self._clock(), placement))
        self.namespaces[placement.decode_id] = placement.cache_namespace
        return Routed(
            placement.prefill_id,
            placement.decode_id,
            wanted.choices,
            placement.route.local,
            placement.encoder,
        )


def route_request(job: Job, wanted: ChooseRoute, state: RequestState) -> RouteRequest:
    """Return what the router is to know of an attempt."""
    images = job.request.images
    failed = state.limits.failed_workers
    return RouteRequest(
        job.request.session_id or job.work_id,
        len(wanted.token_ids),
        job.worst_case_tokens,
        wanted.avoid,
        after_loss=state.attempts > state.refused + wanted.remote,
        remote=wanted.remote,
        suspects=failed.suspects,
        suspected_at=failed.suspected_at,
        images_end=0 if images is None else images.end,
    )
