"""The pools of API keys' quotas in Redis, and the gateways that share them.

    diptych:key-quota:NAME:R:T:C   hash of one key and quota (requests and tokens a minute, concurrent
                                   requests; - is no limit): "requests", "tokens" -> "level at",
                                   "times" -> "settled_at touched_at", "gateway:ID" -> "held written_at"
    diptych:gateways               hash: gateway id -> time of its last sign of life

Times are seconds of Redis' own clock. What a turn at a pool means is the business of pool.py. Here the table
is read, changed and written as one step, and once more where another gateway was faster.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import WatchError
from redis.typing import EncodableT, FieldT

from diptych.runtime.discovery import store
from gateway.access.quota import Quota
from gateway.access.shared_quota.pool import (
    BucketLevel,
    PoolAsk,
    PoolGrant,
    PoolTable,
    SlotLine,
    Turn,
    take_slice,
)

TRIES: Final = 8
TURNS_AT_ONCE: Final = 64
"""Turns that go on together, a connection each: beyond its limit, 100, redis-py's pool fails."""
KEEP_S: Final = 86_400
"""A pool that no gateway touched for so long is gone; all but the deepest debts are paid then."""
GATEWAYS: Final = "diptych:gateways"
ALIVE_S: Final = 5.0
"""A gateway with an older sign of life is gone."""
_GATEWAY: Final = b"gateway:"


def pool_key(name: str, quota: Quota) -> str:
    """Return the key of a pool: a changed quota is another one, which is full."""
    limits = (quota.requests_per_minute, quota.tokens_per_minute, quota.concurrent_requests)
    return ":".join(["diptych:key-quota", name, *("-" if one is None else str(one) for one in limits)])


class PoolStore:
    """Access of one gateway to all pools. Tasks may use it at the same time."""

    def __init__(self, redis_url: str, gateway_id: str) -> None:
        """Raises ValueError for a malformed URL."""
        self._redis: Redis = store.connect(redis_url)
        self._gateway_id = gateway_id
        self._turns = asyncio.Semaphore(TURNS_AT_ONCE)

    async def take_slice(self, key: str, quota: Quota, ask: PoolAsk, gateways: int) -> PoolGrant | None:
        """Take a turn at a pool; None: others were faster each time, and nothing was changed.

        Raises one of `store.STORE_ERRORS` where Redis does not answer; the turn may have happened then.
        """
        async with self._turns, self._redis.pipeline(transaction=True) as pipe:
            for _ in range(TRIES):
                with contextlib.suppress(WatchError):
                    await pipe.watch(key)
                    before: Any = await pipe.hgetall(key)
                    now: Any = await pipe.time()
                    turn = Turn(self._gateway_id, now[0] + now[1] / 1e6, gateways)
                    grant, after = take_slice(quota, ask, read_pool(before), turn)
                    pipe.multi()  # type: ignore[no-untyped-call]
                    pipe.delete(key)
                    pipe.hset(key, mapping=written_pool(after))
                    pipe.expire(key, KEEP_S)
                    await pipe.execute()
                    return grant
        return None

    async def count_gateways(self) -> int:
        """Give a sign of life, and return how many gateways do. Raises one of `store.STORE_ERRORS`."""
        now: Any = await self._redis.time()
        at = now[0] + now[1] / 1e6
        await self._redis.hset(GATEWAYS, self._gateway_id, f"{at:.3f}")
        seen: Any = await self._redis.hgetall(GATEWAYS)
        ages: dict[bytes, float] = {name: at - _numbers(value, 1, (0.0,))[0] for name, value in seen.items()}
        if gone := [name for name, age in ages.items() if age > KEEP_S]:
            await self._redis.hdel(GATEWAYS, *gone)
        return max(sum(age <= ALIVE_S for age in ages.values()), 1)

    async def leave(self) -> None:
        """Take back the sign of life. Raises one of `store.STORE_ERRORS`."""
        await self._redis.hdel(GATEWAYS, self._gateway_id)

    async def close(self) -> None:
        with contextlib.suppress(*store.STORE_ERRORS):
            await self._redis.aclose()


def read_pool(fields: Mapping[bytes, bytes]) -> PoolTable | None:
    """Parse a pool; None for one that is not there. Fields of other programs are left out."""
    if b"times" not in fields:
        return None
    settled_at, touched_at = _numbers(fields[b"times"], 2, (0.0, 0.0))
    lines = {
        name.removeprefix(_GATEWAY).decode("utf-8", "replace"): SlotLine(int(held), at)
        for name, value in fields.items()
        if name.startswith(_GATEWAY)
        for held, at in [_numbers(value, 2, (0.0, 0.0))]
    }
    return PoolTable(
        _level(fields.get(b"requests")), _level(fields.get(b"tokens")), lines, settled_at, touched_at
    )


def written_pool(table: PoolTable) -> dict[FieldT, EncodableT]:
    """Return the fields of a pool's hash."""
    fields: dict[FieldT, EncodableT] = {b"times": f"{table.settled_at:.6f} {table.touched_at:.6f}"}
    for name, level in ((b"requests", table.requests), (b"tokens", table.tokens)):
        if level is not None:
            fields[name] = f"{level.amount:.9f} {level.at:.6f}"
    for gateway, line in table.lines.items():
        fields[_GATEWAY + gateway.encode()] = f"{line.held} {line.written_at:.6f}"
    return fields


def _level(value: bytes | None) -> BucketLevel | None:
    numbers = _numbers(value or b"", 2, ())
    return BucketLevel(*numbers) if numbers else None


def _numbers(value: bytes, count: int, otherwise: tuple[float, ...]) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in value.split())
    except ValueError:
        return otherwise
    return numbers if len(numbers) == count else otherwise
