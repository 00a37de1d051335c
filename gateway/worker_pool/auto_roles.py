"""Roles that follow the load: the looks at the workers, the wanted numbers, and the orders that follow.

Every gateway looks for itself, at loads that all workers report to all gateways and at its own queue; the
lease lets one of them act. Without `--auto-roles` the wanted numbers are metrics, for operators and
autoscalers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from diptych.runtime.errors import RoleChangeRefused
from diptych.runtime.task_cancellation import end_task
from gateway.admission.queue import AdmissionQueue
from gateway.attempt.types import Role
from gateway.worker_pool.registry import Worker, WorkerRegistry
from gateway.worker_pool.role_balance import RoleBalancer
from gateway.worker_pool.role_changes import RoleChanges
from gateway.worker_pool.role_demand import (
    DecodeLoad,
    PrefillLoad,
    QueuedLoad,
    SloTargets,
    Wanted,
    wanted_workers,
)
from gateway.worker_pool.role_rules import RoleBounds, views
from gateway.worker_pool.step_rates import prefill_token_s

LOOK_S = 0.5
_log = logging.getLogger(__name__)


class AutoRoles:
    """Looks at the workers of a gateway and, once started, changes their roles."""

    def __init__(
        self,
        registry: WorkerRegistry,
        queue: AdmissionQueue,
        changes: RoleChanges,
        targets: SloTargets,
        bounds: RoleBounds,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._queue = queue
        self._changes = changes
        self._targets = targets
        self._bounds = bounds
        self._clock = clock
        self._balancer = RoleBalancer(bounds)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="auto roles")

    async def close(self) -> None:
        await end_task(self._task)

    def wanted(self) -> Wanted:
        """Return the number of workers that each role needs now."""
        workers = [w for w in self._registry.linked() if w.accepts_work]
        prefill = [w for w in workers if w.record.role == Role.PREFILL.value]
        decode = [w for w in workers if w.record.role == Role.DECODE.value]
        token_s = prefill_token_s(w.rates for w in prefill or decode)
        queue, size = self._queue, self._registry.block_size() or 1
        queued = QueuedLoad(
            queue.waiting,
            queue.queued_tokens,
            -(-queue.waiting_kv_tokens // size),
        )
        return wanted_workers(
            [PrefillLoad(w.load.busy_share, w.load.waiting_tokens, token_s) for w in prefill],
            [_decode_load(w, token_s) for w in decode],
            queued,
            self._targets,
        )

    def wanted_count(self, role: Role) -> int:
        """Return the whole number of workers that a role needs, at least its bound."""
        wanted = self.wanted()
        return max(
            math.ceil(wanted.prefill if role is Role.PREFILL else wanted.decode), self._bounds.least(role)
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception:  # one odd report must not end all looks
                _log.exception("the roles could not be looked at")

    async def _look(self) -> None:
        wanted = self.wanted()
        worker_id = self._balancer.decide(wanted, views(self._registry.linked()), self._clock())
        if worker_id is None or await self._changes.pauses():
            return
        try:
            await self._changes.change(worker_id, bounds=self._bounds)
        except RoleChangeRefused as refused:
            _log.info("worker %s: %s", worker_id, refused)
        else:
            _log.info("wanted: %.1f prefill and %.1f decode workers", wanted.prefill, wanted.decode)
            self._balancer.forget()


def _decode_load(worker: Worker, token_s: float) -> DecodeLoad:
    load = worker.load
    running = load.running
    return DecodeLoad(
        used_blocks=max(load.total_blocks - load.free_blocks, 0),
        total_blocks=load.total_blocks,
        sequences=running + load.waiting,
        max_sequences=load.max_running,
        step_s=worker.rates.step_s(running, token_s) if running else 0.0,
    )
