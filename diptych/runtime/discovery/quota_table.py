"""The table of the gateways' quotas of KV memory in Redis, one for each model.

    diptych:quotas:DIGEST    hash: gateway id -> "held wanted written_at", and "" -> "settled_at touched_at";
                             amounts in tokens, times in seconds of Redis' own clock

What a turn at the table means is the business of quota_shares.py. Here the table is read, changed and written
as one step, and once more where another gateway was faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import WatchError
from redis.typing import EncodableT, FieldT

from diptych.runtime.discovery import store
from diptych.runtime.discovery.quota_shares import MemoryNeed, Quota, QuotaLine, QuotaTable, take_turn

TRIES = 5
KEEP_S = 3600
"""A table that no gateway touched for so long is gone."""
_TIMES = b""


def quota_key(model_digest: str) -> str:
    return f"diptych:quotas:{model_digest}"


class QuotaTableStore:
    """Access of one gateway to its model's table. Used by one task."""

    def __init__(self, redis_url: str, model_digest: str, gateway_id: str) -> None:
        """Raises ValueError for a malformed URL."""
        self._redis: Redis = store.connect(redis_url)
        self._key = quota_key(model_digest)
        self._gateway_id = gateway_id

    async def take_turn(self, need: MemoryNeed) -> Quota | None:
        """Write this gateway's line and return its quota; None: others were faster each time.

        Raises one of `store.STORE_ERRORS` where Redis does not answer.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            for _ in range(TRIES):
                with contextlib.suppress(WatchError):
                    await pipe.watch(self._key)
                    before: Any = await pipe.hgetall(self._key)
                    now: Any = await pipe.time()
                    quota, after = take_turn(
                        self._gateway_id, need, read_table(before), now[0] + now[1] / 1e6
                    )
                    pipe.multi()  # type: ignore[no-untyped-call]
                    pipe.delete(self._key)
                    pipe.hset(self._key, mapping=written_table(after))
                    pipe.expire(self._key, KEEP_S)
                    await pipe.execute()
                    return quota
        return None

    async def close(self) -> None:
        with contextlib.suppress(*store.STORE_ERRORS):
            await self._redis.aclose()


def read_table(fields: Mapping[bytes, bytes]) -> QuotaTable | None:
    """Parse a table; None for one that is not there. Lines of other programs are left out."""
    times = _numbers(fields.get(_TIMES, b""), 2)
    if times is None:
        return None
    lines: dict[str, QuotaLine] = {}
    for name, value in fields.items():
        numbers = _numbers(value, 3) if name != _TIMES else None
        if numbers is not None:
            with contextlib.suppress(UnicodeDecodeError):
                lines[name.decode()] = QuotaLine(int(numbers[0]), int(numbers[1]), numbers[2])
    return QuotaTable(lines, *times)


def written_table(table: QuotaTable) -> dict[FieldT, EncodableT]:
    """Return the fields of a table's hash."""
    fields: dict[FieldT, EncodableT] = {
        name.encode(): f"{line.held} {line.wanted} {line.written_at:.6f}"
        for name, line in table.lines.items()
    }
    return {**fields, _TIMES: f"{table.settled_at:.6f} {table.touched_at:.6f}"}


def _numbers(value: bytes, count: int) -> tuple[float, ...] | None:
    try:
        numbers = tuple(float(part) for part in value.split())
    except ValueError:
        return None
    return numbers if len(numbers) == count else None
