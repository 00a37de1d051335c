"""Leases of this gateway on the quotas of API keys: turns at their pools, beside and before requests.

A request waits for Redis where its gateway holds too little of its key's quota: at the key's first use, and
where the quota is so small that nothing is taken in advance. It waits `WAIT_S` at most, together with all
others of its key. After a wait in vain none does, until Redis has answered again.

What is held and not used goes back within a second or two, and when the gateway ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from diptych.runtime.discovery import store
from diptych.runtime.task_cancellation import end_task
from gateway.access.quota import Bucket, Quota, QuotaUsage, Slots
from gateway.access.shared_quota.slices import PoolView, QuotaSlice
from gateway.access.shared_quota.store import PoolStore, pool_key

WAIT_S = 0.05
"""Time for which a request waits for Redis."""
TICK_S: Final = 1.0
RENEWED_AT_ONCE: Final = 16
"""Leases that are renewed together: requests' turns come between them."""
_CLOSE_S: Final = 0.5
_PLACE_RETRY_S: Final = 0.02
"""Time in which a gateway brings a place back whose request has ended."""
_log = logging.getLogger(__name__)


class KeyLease:
    """Lease on one key's quota. See `gateway.access.quota.Lease`."""

    def __init__(self, key: str, quota: Quota, leases: QuotaLeases) -> None:
        self._key, self._quota, self._leases = key, quota, leases
        self._slice = QuotaSlice(quota, leases.view)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def requests(self) -> Bucket | None:
        return self._slice.requests

    @property
    def tokens(self) -> Bucket | None:
        return self._slice.tokens

    @property
    def slots(self) -> Slots | None:
        return self._slice.slots

    @property
    def idle(self) -> bool:
        """True where nothing is held and no turn goes on."""
        return self._slice.idle and self._task is None

    async def prepare(self, requests: int, prompt_tokens: int) -> None:
        """Take what the slice lacks for requests with ``prompt_tokens`` in all, or wait `WAIT_S`."""
        if not self._slice.lacks(requests, prompt_tokens, time.monotonic()):
            return
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turn(requests, prompt_tokens)
                if self._slice.slots is not None and self._slice.slots.is_full:
                    await asyncio.sleep(_PLACE_RETRY_S)
                    await self._turn(requests, prompt_tokens)
        except TimeoutError:
            self._leases.on_late()

    def used(self) -> None:
        """Renew the slice in the background where it runs low."""
        if self._leases.view.answers and self._slice.runs_low:
            self.renew()
        self._leases.active.add(self)

    def renew(self) -> None:
        """Start a turn, unless one goes on."""
        if self._task is None:
            self._task = asyncio.create_task(self._take_turns(), name="quota lease")

    async def renewed(self) -> None:
        """Take a turn, or wait for the one that goes on."""
        self.renew()
        await self._rest()

    async def finish(self) -> None:
        """Bring back what is not used."""
        await self._rest()
        for _ in range(2):  # what was used since the last turn is settled first
            if not self._slice.idle:
                await self._take_turn(0, 0)

    async def close(self) -> None:
        await end_task(self._task)

    async def _rest(self) -> None:
        """Wait for the turn that goes on, if one does; its errors are its own."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _turn(self, requests: int, tokens: int) -> None:
        """Wait for a turn that asks for so much, beside what others wait for."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((requests, tokens, done))
        self._leases.active.add(self)
        self.renew()
        await done

    async def _take_turns(self) -> None:
        """Take a turn for all that wait, and again while more came meanwhile."""
        try:
            while True:
                waiting, self._waiting = self._waiting, []
                await self._take_turn(sum(one[0] for one in waiting), sum(one[1] for one in waiting))
                for *_, done in waiting:
                    if not done.done():
                        done.set_result(None)
                if not self._waiting:
                    return
        finally:
            self._task = None

    async def _take_turn(self, requests: int, tokens: int) -> None:
        ask = self._slice.ask(requests, tokens, time.monotonic())
        try:
            grant = await self._leases.pools.take_slice(
                self._key, self._quota, ask, self._leases.view.gateways
            )
        except store.STORE_ERRORS as error:
            self._leases.on_lost(error)
            return
        except Exception:
            _log.exception("a turn at a key's quota failed")
            return
        if grant is None:
            self._slice.refused()
            return
        self._slice.granted(grant, time.monotonic())
        self._leases.on_answer()


class QuotaLeases:
    """Leases on the quotas of all keys: `start`, `usage`, `close`."""

    def __init__(self, pools: PoolStore, registry: CollectorRegistry) -> None:
        self.pools = pools
        self.view = PoolView()
        self.active: set[KeyLease] = set()
        """Leases that may hold something."""
        self._task: asyncio.Task[None] | None = None
        self._round: asyncio.Task[None] | None = None
        self._turns = Counter(
            "diptych_key_quota_turns",
            "Turns at pools of API keys' quotas by outcome: answered, late (a request waited in vain), lost",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("answered", "late", "lost"):
            self._turns.labels(outcome)

    def usage(self, name: str, quota: Quota) -> QuotaUsage:
        """Return the usage of a key's quota, shared with other gateways where it has limits."""
        if quota == Quota():
            return QuotaUsage(name, quota)
        return QuotaUsage(name, quota, KeyLease(pool_key(name, quota), quota, self))

    def start(self) -> None:
        """Start renewing; returns at once, whether Redis is there or not."""
        self._task = asyncio.create_task(self._run(), name="quota leases")

    async def close(self) -> None:
        """Bring back what is held, if Redis answers soon."""
        await end_task(self._task)
        await end_task(self._round)
        if self.view.answers:
            with contextlib.suppress(TimeoutError, *store.STORE_ERRORS):
                async with asyncio.timeout(_CLOSE_S):
                    await asyncio.gather(*(lease.finish() for lease in self.active))
                    await self.pools.leave()
        self.view.answers = False  # what ends from here on asks no pool
        for lease in list(self.active):
            await lease.close()
        await self.pools.close()

    def on_answer(self) -> None:
        """Note that Redis has answered a turn."""
        self.view.answers = True
        self._turns.labels("answered").inc()

    def on_late(self) -> None:
        """Note that a request has waited in vain: the next ones do not."""
        self.view.answers = False
        self._turns.labels("late").inc()

    def on_lost(self, error: Exception) -> None:
        """Note that Redis did not answer a turn."""
        self.view.answers = False
        self._turns.labels("lost").inc()
        _log.debug("quotas are counted by the last leases: %s", error)

    async def _run(self) -> None:
        while True:
            try:
                self.view.gateways = await self.pools.count_gateways()
                self.view.answers = True
            except store.STORE_ERRORS as error:
                self.on_lost(error)
            except Exception:
                _log.exception("the gateways could not be counted; trying on")
            if self._round is None or self._round.done():
                self._round = asyncio.create_task(self._renew_all(), name="quota renewals")
            await asyncio.sleep(TICK_S)

    async def _renew_all(self) -> None:
        """Renew the leases that hold something, some at a time, while Redis answers."""
        active = list(self.active)
        for start in range(0, len(active), RENEWED_AT_ONCE):
            if not self.view.answers:
                return
            leases = active[start : start + RENEWED_AT_ONCE]
            self.active.difference_update(lease for lease in leases if lease.idle)
            await asyncio.gather(*(lease.renewed() for lease in leases if not lease.idle))
