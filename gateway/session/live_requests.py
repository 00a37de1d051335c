"""The live requests of this gateway: by tenant and client's id, and by the id that the workers know.

Each tenant has ids of its own: two may use the same one at the same time, and neither learns of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.runtime.errors import DuplicateRequest, PermissionDenied
from gateway.session.events import CancelRequested, Event, ShuttingDown, WorkerDown, WorkerUp
from gateway.session.request_driver import RequestDriver
from gateway.worker_pool.codec import WorkerEvent


class LiveRequests:
    """Registry of the live requests, which passes the workers' events to their drivers."""

    def __init__(self) -> None:
        self._reserved: set[tuple[str, str]] = set()  # live (tenant, id), registered below or not yet
        self._by_request: dict[str, dict[str, RequestDriver]] = {}  # by id, then by tenant
        self._by_work: dict[str, RequestDriver] = {}

    def __len__(self) -> int:
        return len(self._reserved)

    def drivers(self) -> list[RequestDriver]:
        """Return the drivers of the live requests."""
        return list(self._by_work.values())

    def is_reserved(self, tenant: str, request_id: str) -> bool:
        """Return whether a live request of the tenant has this id."""
        return (tenant, request_id) in self._reserved

    def reserve(self, tenant: str, request_id: str) -> None:
        """Claim an id. Raises DuplicateRequest while a live request of the tenant has it."""
        if (tenant, request_id) in self._reserved:
            raise DuplicateRequest(request_id)
        self._reserved.add((tenant, request_id))

    def add(self, driver: RequestDriver) -> None:
        """Register the driver of a request whose id is reserved."""
        job = driver.job
        self._by_request.setdefault(job.request.request_id, {})[job.tenant] = driver
        self._by_work[job.work_id] = driver

    def release(self, tenant: str, request_id: str) -> None:
        """Free the id of a request that is over, and forget its driver."""
        self._reserved.discard((tenant, request_id))
        owners = self._by_request.get(request_id, {})
        driver = owners.pop(tenant, None)
        if driver is not None:
            del self._by_work[driver.job.work_id]
        if not owners:
            self._by_request.pop(request_id, None)

    def cancel_request(self, tenant: str, request_id: str) -> bool:
        """Finish a request with CANCELLED; False when none of this id still runs.

        Raises PermissionDenied when the request of this id is another tenant's.
        """
        owners = self._by_request.get(request_id, {})
        driver = owners.get(tenant)
        if driver is None and owners:
            raise PermissionDenied("this request is not yours")
        if driver is None or driver.state.over:
            return False
        driver.feed(CancelRequested())
        return True

    def on_events(self, events: Sequence[WorkerEvent]) -> None:
        """Pass a worker's events to the drivers of their requests; those of finished requests are dropped.

        A driver gets all that one message says about its request together, so that choices that fail at once
        share the next attempt.
        """
        by_work: dict[str, list[WorkerEvent]] = {}
        for event in events:
            by_work.setdefault(event.work_id, []).append(event)
        for work_id, of_request in by_work.items():
            driver = self._by_work.get(work_id)
            if driver is not None:
                driver.on_events(of_request)

    def on_worker_down(self, worker_id: str, graceful: bool) -> None:
        """Pass the loss of a worker to every request. ``graceful``: it had announced its shutdown."""
        self._feed_all(WorkerDown(worker_id, graceful))

    def on_worker_up(self, worker_id: str, same_process: bool) -> None:
        """Pass a worker's new link to every request: to the same process, or to another in its place."""
        self._feed_all(WorkerUp(worker_id, same_process))

    def shut_down(self) -> None:
        """End all requests with a status: the shutdown timeout is over."""
        self._feed_all(ShuttingDown())

    def _feed_all(self, event: Event) -> None:
        for driver in list(self._by_work.values()):
            driver.feed(event)
