"""The requests that are alive in this gateway: by tenant and client's id, and by the id that workers know.

Each tenant has ids of its own: two may use the same one at the same time, and neither learns of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.runtime.errors import DuplicateRequest, PermissionDenied
from gateway.session.request_driver import RequestDriver
from gateway.session.session_events import CancelAsked, Event, ShuttingDown, WorkerGone, WorkerUp
from gateway.worker_pool.codec import LinkEvent


class LiveRequests:
    """Registry and switchboard: what comes from the workers finds its conversation here."""

    def __init__(self) -> None:
        self._reserved: set[tuple[str, str]] = set()
        """(tenant, id) that are alive, registered below or not yet."""
        self._by_request: dict[str, dict[str, RequestDriver]] = {}  # by id, then by tenant
        self._by_work: dict[str, RequestDriver] = {}

    def __len__(self) -> int:
        return len(self._reserved)

    def reserved(self, tenant: str, request_id: str) -> bool:
        """Whether a live request of the tenant has this id."""
        return (tenant, request_id) in self._reserved

    def reserve(self, tenant: str, request_id: str) -> None:
        """Claim an id. Raises DuplicateRequest while a live request of the tenant has it."""
        if (tenant, request_id) in self._reserved:
            raise DuplicateRequest(request_id)
        self._reserved.add((tenant, request_id))

    def add(self, conversation: RequestDriver) -> None:
        job = conversation.job
        self._by_request.setdefault(job.request.request_id, {})[job.tenant] = conversation
        self._by_work[job.work_id] = conversation

    def release(self, tenant: str, request_id: str) -> None:
        """The request is over: nothing finds it any more."""
        self._reserved.discard((tenant, request_id))
        owners = self._by_request.get(request_id, {})
        conversation = owners.pop(tenant, None)
        if conversation is not None:
            del self._by_work[conversation.job.work_id]
        if not owners:
            self._by_request.pop(request_id, None)

    def cancel(self, tenant: str, request_id: str) -> bool:
        """Finish a request with CANCELLED. False: there is none of this id that still runs.

        Raises PermissionDenied when the request of this id is another tenant's.
        """
        owners = self._by_request.get(request_id, {})
        conversation = owners.get(tenant)
        if conversation is None and owners:
            raise PermissionDenied("this request is not yours")
        if conversation is None or conversation.choices.over:
            return False
        conversation.feed(CancelAsked())
        return True

    def deliver(self, news: Sequence[LinkEvent]) -> None:
        """Hand what a worker said to those it is about; nobody waits for news of a request that is over.

        What one message says about a request is heard together: choices that fail at once go on together.
        """
        heard: dict[str, list[LinkEvent]] = {}
        for item in news:
            heard.setdefault(item.work_id, []).append(item)
        for work_id, items in heard.items():
            conversation = self._by_work.get(work_id)
            if conversation is not None:
                conversation.hear(items)

    def worker_gone(self, worker_id: str, left: bool) -> None:
        """Every request that this worker had part in learns it now. ``left``: it had said it would go."""
        self._feed_all(WorkerGone(worker_id, left))

    def worker_up(self, worker_id: str, returned: bool) -> None:
        """It is linked, the very process if it ``returned``, or another one is in its place."""
        self._feed_all(WorkerUp(worker_id, returned))

    def shut_down(self) -> None:
        """The grace of a shutdown is over."""
        self._feed_all(ShuttingDown())

    def _feed_all(self, event: Event) -> None:
        for conversation in list(self._by_work.values()):
            conversation.feed(event)
