"""Changes of workers' roles: the order to the worker, under a lease, until it serves in its new role.

    take the lease -> ask the rules again -> Drain with the new role -> its successor is linked -> release

The worker drains as for any other end. Its successor has another id and names it as dead
(`WorkerRecord.replaces`), by which the change is known to be over, in the new role or, where that did not
start, in the old one. A gateway that dies meanwhile leaves the lease to expire: the worker, which has its
order, changes all the same, and no second change begins before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from diptych.runtime.discovery.role_lease import RoleLease
from diptych.runtime.discovery.store import STORE_ERRORS
from diptych.runtime.errors import RoleChangeRefused
from diptych.runtime.task_cancellation import end_task
from gateway.attempt.types import TEXT_ROLES, Role
from gateway.worker_pool.links import LinkDown
from gateway.worker_pool.registry import Worker, WorkerRegistry
from gateway.worker_pool.role_rules import RoleBounds, objection, other, views

START_S = 180.0
"""Time that a successor gets to load the model and be linked; then the next change may begin without it."""
DRAIN_S = 60.0
"""Time for a drain whose grace is the worker's own."""
_LOOK_S = 0.25
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Change:
    worker_id: str
    role: Role
    becomes: Role
    token: str
    until: float


class RoleChanges:
    """Changes that this gateway orders.

    Args:
        pause_s: time after the end of a change in which no gateway begins an automatic one.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        lease: RoleLease,
        clock: Callable[[], float],
        *,
        pause_s: float = 0.0,
    ) -> None:
        self._registry = registry
        self._lease = lease
        self._clock = clock
        self._pause_s = pause_s
        self._following: asyncio.Task[None] | None = None
        self.done = dict.fromkeys(TEXT_ROLES, 0)
        """Changes of this gateway that ended in each role."""

    async def change(
        self, worker_id: str, grace_s: float | None = None, bounds: RoleBounds | None = None
    ) -> None:
        """Order a linked worker to change to the other role. Raises RoleChangeRefused."""
        self._check(worker_id, bounds)
        bound_s = (DRAIN_S if grace_s is None else grace_s) + START_S
        try:
            token = await self._lease.take(bound_s)
        except STORE_ERRORS as error:
            raise RoleChangeRefused(
                f"the directory does not answer ({type(error).__name__}), which sees to one change at a time"
            ) from None
        if token is None:
            raise RoleChangeRefused("another worker is changing its role: one changes at a time")
        try:
            worker = self._check(worker_id, bounds)  # it may have been lost meanwhile, or another one
            becomes = other(Role(worker.record.role))
            worker.link.send(worker.link.codec.build_drain(grace_s, becomes))
        except BaseException as error:
            await self._release(token, 0.0)
            if isinstance(error, LinkDown):
                raise RoleChangeRefused("its link was lost") from None
            raise
        _log.info("worker %s is to become a %s worker", worker_id, becomes.value)
        change = _Change(worker_id, Role(worker.record.role), becomes, token, self._clock() + bound_s)
        await end_task(self._following)  # its lease has expired, or this one could not be taken
        self._following = asyncio.create_task(self._follow(change), name="role change")

    async def pauses(self) -> bool:
        """Return whether no automatic change may begin: one is going on or was just now, or Redis is away."""
        if self._following is not None and not self._following.done():
            return True
        try:
            return await self._lease.pauses()
        except STORE_ERRORS:
            return True

    async def close(self) -> None:
        """Forget the change that is going on; its lease expires, or is still needed."""
        await end_task(self._following)
        await self._lease.close()

    def _check(self, worker_id: str, bounds: RoleBounds | None) -> Worker:
        """Return the worker. Raises RoleChangeRefused where the rules object."""
        if why := objection(views(self._registry.linked()), worker_id, bounds):
            raise RoleChangeRefused(why)
        return self._registry.require(worker_id)

    async def _follow(self, change: _Change) -> None:
        successor = None
        while successor is None and self._clock() < change.until:
            await asyncio.sleep(_LOOK_S)
            successor = self._successor(change)
        await self._release(change.token, self._pause_s)
        if successor is None:
            _log.warning("worker %s did not come back as a %s worker", change.worker_id, change.becomes.value)
        elif successor.record.role != change.becomes.value:
            _log.warning("worker %s is a %s worker still", change.worker_id, change.role.value)
        else:
            self.done[change.becomes] += 1

    def _successor(self, change: _Change) -> Worker | None:
        """Return the ready worker that was started in its place."""
        ready = (w for w in self._registry.linked() if w.accepts_work and w.reported)
        return next((w for w in ready if change.worker_id in w.record.dead), None)

    async def _release(self, token: str, pause_s: float) -> None:
        with contextlib.suppress(*STORE_ERRORS):  # it expires
            await self._lease.release(token, pause_s)
