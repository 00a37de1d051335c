"""Fair shares of tenants over all gateways of a model: turns at a table in Redis, beside the requests.

    diptych:fair-shares:DIGEST    hash: gateway id -> its line (`gateway.admission.fair_share_lines`)

One background task writes this gateway's line and reads the others' four times a second while requests come,
else once a second, and not at all where there is one tenant. Admission itself reads memory only. While Redis
is away the last reading holds for `LEASE_S`; afterwards the gateway counts only itself, until it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from redis.asyncio import Redis

from diptych.runtime.discovery import store
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.task_cancellation import end_task
from gateway.admission.fair_share_lines import (
    LEASE_S,
    GatewayLine,
    OtherLines,
    decode_line,
    encode_line,
)
from gateway.admission.gate import AdmissionGate

TURN_S: Final = 0.25
RESTING_TURN_S: Final = 1.0
KEEP_S: Final = 60
"""A table that no gateway touched for so long is gone."""
_CLOSE_S: Final = 0.5
_log = logging.getLogger(__name__)


class FairShareTable:
    """Access of one gateway to its model's table. Used by one task."""

    def __init__(self, redis_url: str, model_digest: str, gateway_id: str) -> None:
        """Raises ValueError for a malformed URL."""
        self._redis: Redis = store.connect(redis_url)
        self._key = f"diptych:fair-shares:{model_digest}"
        self._gateway_id = gateway_id

    async def exchange(self, line: GatewayLine) -> Mapping[str, GatewayLine]:
        """Write this gateway's line and return those of the others, by gateway id.

        Raises one of `store.STORE_ERRORS` where Redis does not answer.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hset(self._key, self._gateway_id, encode_line(line))
            pipe.expire(self._key, KEEP_S)
            pipe.hgetall(self._key)
            answers: Any = await pipe.execute()
        lines = {
            name.decode("utf-8", "replace"): decode_line(value)
            for name, value in answers[-1].items()
            if name != self._gateway_id.encode()
        }
        return {name: one for name, one in lines.items() if one is not None}

    async def remove(self, *gateways: str) -> None:
        """Take lines out of the table; none is named: this gateway's. Raises one of `store.STORE_ERRORS`."""
        await self._redis.hdel(self._key, *(gateways or (self._gateway_id,)))

    async def close(self) -> None:
        with contextlib.suppress(*store.STORE_ERRORS):
            await self._redis.aclose()


class SharedFairShares:
    """The task that charges tenants of `gate` for what they get elsewhere: `start`, `close`.

    Args:
        gate: whose queue deals the capacity.
        table: where the gateways tell each other.
        tenants: returns how many there are; with one there is nothing to share.
        metrics: counts turns, and tokens that were charged.
    """

    def __init__(
        self,
        gate: AdmissionGate,
        table: FairShareTable,
        tenants: Callable[[], int],
        metrics: GatewayMetrics,
    ) -> None:
        self._gate = gate
        self._table = table
        self._tenants = tenants
        self._metrics = metrics
        self._others = OtherLines()
        self._answered_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start taking turns; returns at once, whether Redis is there or not."""
        self._task = asyncio.create_task(self._run(), name="fair shares")

    async def close(self) -> None:
        """End the turns, and take this gateway's line back if Redis answers soon."""
        await end_task(self._task)
        if self._answered_at is not None:
            with contextlib.suppress(TimeoutError, *store.STORE_ERRORS):
                async with asyncio.timeout(_CLOSE_S):
                    await self._table.remove()
        await self._table.close()

    async def _run(self) -> None:
        while True:
            resting = True
            if self._tenants() > 1:
                try:
                    resting = not await self._take_turn()
                    self._metrics.fair_share_turns.labels("answered").inc()
                except store.STORE_ERRORS as error:
                    self._metrics.fair_share_turns.labels("lost").inc()
                    self._forget_if_old()
                    _log.debug("shares of tenants are as last read: %s", error)
                except Exception:
                    _log.exception("the gateways' shares of tenants could not be exchanged; trying on")
                    self._forget_if_old()
            await asyncio.sleep(RESTING_TURN_S if resting else TURN_S)

    async def _take_turn(self) -> bool:
        """Exchange lines and charge what is new; return whether requests of tenants come here."""
        queue = self._gate.queue
        line = queue.served_here.next_line(queue.running_of_tenants, time.monotonic())
        lines = await self._table.exchange(line)
        now = time.monotonic()
        reading = self._others.read(lines, now)
        self._answered_at = now
        charged = self._gate.charge_elsewhere(reading.served, reading.running)
        self._metrics.fair_share_tokens.inc(charged)
        if reading.dead:
            await self._table.remove(*reading.dead)
        return bool(line.tenants)

    def _forget_if_old(self) -> None:
        if self._answered_at is not None and time.monotonic() - self._answered_at >= LEASE_S:
            self._answered_at = None
            self._others.forget()
            self._gate.forget_elsewhere()
