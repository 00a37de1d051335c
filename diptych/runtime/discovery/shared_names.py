"""Names that all processes of a kind agree on, in one hash of the directory: gateways have their adapters so.

Each process has a copy and decides from it alone, as of workers (`diptych.runtime.discovery.mirror`). What
one names or drops is written at once, and read by the others within `POLL_S`. While Redis is away every
process goes on with its copy, and writes what was changed meanwhile once Redis is back. A store that lost its
data, or is new, gets the names again from the processes that know them: a marker in the hash, random, tells
the two apart.

    diptych:names:SCOPE      hash: name → JSON; the field "" is the marker
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio import Redis

from diptych.runtime.discovery import store
from diptych.runtime.task_cancellation import end_task

POLL_S = 0.5
_MARKER = ""
_log = logging.getLogger(__name__)

Values = Mapping[str, dict[str, Any]]


class SharedNames:
    """Copy of the names of a scope, this process's own. Used on the event loop's thread.

    Args:
        scope: of those that share names.
        on_change: gets all names and their values when the copy has changed by what others wrote.
    """

    def __init__(self, redis_url: str, scope: str, on_change: Callable[[Values], None]) -> None:
        self._redis: Redis = store.connect(redis_url)
        self._key = f"diptych:names:{scope}"
        self._on_change = on_change
        self._values: dict[str, dict[str, Any]] = {}
        self._pending: dict[str, dict[str, Any] | None] = {}  # not written yet; None = dropped
        self._marker: str | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="shared-names")

    async def close(self) -> None:
        await end_task(self._task)
        with contextlib.suppress(*store.STORE_ERRORS):
            await self._redis.aclose()

    def put(self, name: str, value: dict[str, Any]) -> None:
        """Give a name this value, here now and elsewhere soon."""
        self._set(name, value)

    def drop(self, name: str) -> None:
        """Drop a name, likewise."""
        self._set(name, None)

    def _set(self, name: str, value: dict[str, Any] | None) -> None:
        self._pending[name] = value
        self._values = _overlaid(self._values, {name: value})
        self._wake.set()

    async def _run(self) -> None:
        failed = False
        while True:
            try:
                await self.synchronise()
                failed = False
            except store.STORE_ERRORS as error:
                if not failed:
                    _log.info("adapters are not shared with other gateways now: %s", type(error).__name__)
                failed = True
                with contextlib.suppress(*store.STORE_ERRORS):
                    await self._redis.connection_pool.disconnect()
            except Exception:
                _log.exception("sharing names failed; trying on")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            self._wake.clear()
            if failed:
                await asyncio.sleep(POLL_S)

    async def synchronise(self) -> None:
        """Write what is pending and read the rest. Raises `store.STORE_ERRORS`."""
        found = await self._exchange(dict(self._pending))
        if found.get(_MARKER) != self._marker:
            # It knows nothing of what was dropped before it was lost; nor would it of what is named here.
            again = {name: value for name, value in self._values.items() if name not in found}
            self._pending = {**again, **self._pending}
            found = await self._exchange(dict(self._pending))
            self._marker = found.get(_MARKER)
        shared = {name: value for name, text in found.items() if (value := _value(name, text)) is not None}
        values = _overlaid(shared, self._pending)
        if values != self._values:
            self._values = values
            self._on_change(values)

    async def _exchange(self, changes: Mapping[str, dict[str, Any] | None]) -> dict[str, str]:
        """Write changes and return the whole hash, in one transaction."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hsetnx(self._key, _MARKER, secrets.token_hex(8))
            for name, value in changes.items():
                if value is None:
                    pipe.hdel(self._key, name)
                else:
                    pipe.hset(self._key, name, json.dumps(value))
            pipe.hgetall(self._key)
            *_, found = await pipe.execute()
        for name, value in changes.items():
            if self._pending.get(name, ...) is value:  # else it was changed again while this was on its way
                del self._pending[name]
        return {name.decode(errors="replace"): text.decode(errors="replace") for name, text in found.items()}


def _overlaid(
    values: Mapping[str, dict[str, Any]], changes: Mapping[str, dict[str, Any] | None]
) -> dict[str, dict[str, Any]]:
    merged = {name: value for name, value in values.items() if name not in changes}
    merged.update((name, value) for name, value in changes.items() if value is not None)
    return merged


def _value(name: str, text: str) -> dict[str, Any] | None:
    """Return a field's value; None, for the marker and for what another program wrote there."""
    if name == _MARKER:
        return None
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return None
