"""The lease in Redis by which one worker at a time changes its role, over all gateways of a model.

    diptych:role-change:DIGEST   token of the gateway whose change is going on; expires with its bound
    diptych:role-pause:DIGEST    there while the last change is too recent for an automatic one

A lease is given back by its token alone: what expired and is another gateway's by now is left as it is.
Without Redis there is no lease, and so no change: gateways that see different workers would each take one
from the same role.
"""

from __future__ import annotations

import contextlib
import math
import secrets

from redis.asyncio import Redis
from redis.exceptions import WatchError

from diptych.runtime.discovery import store


def change_key(model_digest: str) -> str:
    return f"diptych:role-change:{model_digest}"


def pause_key(model_digest: str) -> str:
    return f"diptych:role-pause:{model_digest}"


class RoleLease:
    """Access of one gateway to its model's lease. Methods raise one of `store.STORE_ERRORS` without Redis."""

    def __init__(self, redis_url: str, model_digest: str) -> None:
        """Raises ValueError for a malformed URL."""
        self._redis: Redis = store.connect(redis_url)
        self._key, self._pause = change_key(model_digest), pause_key(model_digest)

    async def take(self, seconds: float) -> str | None:
        """Return a token of the lease, held for at most `seconds`; None while another change is going on.

        Where Redis took the order and its answer was lost, the lease has no owner until it expires.
        """
        token = secrets.token_hex(8)
        taken = await self._redis.set(self._key, token, nx=True, px=math.ceil(seconds * 1000))
        return token if taken else None

    async def release(self, token: str, pause_s: float) -> None:
        """End the change of this token and let no automatic one begin for `pause_s`."""
        async with self._redis.pipeline(transaction=True) as pipe:
            with contextlib.suppress(WatchError):  # it expired in this moment
                await pipe.watch(self._key)
                if await pipe.get(self._key) != token.encode():
                    return
                pipe.multi()  # type: ignore[no-untyped-call]
                pipe.delete(self._key)
                if pause_s > 0:
                    pipe.set(self._pause, b"1", px=math.ceil(pause_s * 1000))
                await pipe.execute()

    async def pauses(self) -> bool:
        """Return whether the last change is too recent for an automatic one."""
        return await self._redis.get(self._pause) is not None

    async def close(self) -> None:
        with contextlib.suppress(*store.STORE_ERRORS):
            await self._redis.aclose()
