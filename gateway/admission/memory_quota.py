"""Quota of the decode workers' KV memory that this gateway may use, kept up to date beside its requests.

One background task takes the gateway's turn at the table of quotas (`diptych.runtime.discovery.quota_shares`)
four times a second, and sooner while the quota keeps a request waiting. Admission itself reads memory only.
While Redis is away the last quota holds; before the first turn there is none: the gateway counts only itself.
"""

from __future__ import annotations

import asyncio
import logging

from diptych.runtime.discovery import store
from diptych.runtime.discovery.quota_shares import MemoryNeed
from diptych.runtime.discovery.quota_table import QuotaTableStore
from diptych.runtime.task_cancellation import end_task
from gateway.admission.capacity import KvBudget
from gateway.admission.gate import AdmissionGate
from gateway.admission.queue import AdmissionQueue

TURN_S = 0.25
SOON_S = 0.02
KEPT_PARTS = 4  # of a quota one part in so many stays usable during a turn
_log = logging.getLogger(__name__)


class MemoryQuota:
    """The task that keeps the quota of `gate`: `start`, `close`."""

    def __init__(self, gate: AdmissionGate, table: QuotaTableStore) -> None:
        self._gate = gate
        self._table = table
        self._answered = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start taking turns; returns at once, whether Redis is there or not."""
        self._task = asyncio.create_task(self._run(), name="memory quota")

    async def close(self) -> None:
        await end_task(self._task)
        await self._table.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._take_turn()
                self._answered = True
            except store.STORE_ERRORS as error:
                self._answered = False
                _log.debug("the quota of KV memory stays as it is: %s", error)
            except Exception:
                _log.exception("the quota of KV memory could not be renewed; trying on")
            await asyncio.sleep(SOON_S if waits_for_quota(self._gate.queue) else TURN_S)

    async def _take_turn(self) -> None:
        """Offer what is not needed to the others, and take a new quota.

        Requests go on being admitted meanwhile, so what is offered is not used from here on. After a turn
        without an answer, which may have been taken all the same, nothing is offered.
        """
        queue = self._gate.queue
        if queue.kv.capacity is None:
            return
        need = memory_need(queue.kv, queue.waiting_kv_tokens, offers=self._answered)
        queue.kv.quota = None if need.quota is None else need.reserved
        quota = await self._table.take_turn(need)
        if quota is not None:
            self._gate.set_quota(quota.held, quota.attainable)


def memory_need(kv: KvBudget, waiting: int, *, offers: bool) -> MemoryNeed:
    """Return what a gateway has and wants; `waiting` are the tokens of KV memory that its queue needs.

    What it has is at least what it uses; if it `offers` some of its quota, it keeps a part for the requests
    of the next moment, else all.
    """
    has = kv.reserved
    if kv.quota is not None:
        has = max(min(kv.quota, kv.reserved + kv.quota // KEPT_PARTS if offers else kv.quota), kv.reserved)
    return MemoryNeed(kv.capacity or 0, has, waiting, kv.quota)


def waits_for_quota(queue: AdmissionQueue) -> bool:
    """Return whether requests wait that a larger quota, which can be had, would admit."""
    kv, waiting = queue.kv, queue.waiting_kv_tokens
    if kv.quota is None or kv.attainable is None or not waiting:
        return False
    return kv.reserved + waiting > kv.quota < kv.attainable
