"""Names that all processes of a kind agree on, in one hash of the directory: gateways have their adapters so.

Each process has a copy and decides from it alone, as of workers (`diptych.runtime.discovery.mirror`). What
one names or drops is written at once, and read by the others within `POLL_S`. Of two values of a name the
later one counts, by the clocks of the processes that gave them; a dropped name is a value, too, for
`DROPPED_S`. So a store that was away, lost its data or fell back to an older copy gets from each process what
that knows better.

    diptych:names:SCOPE      hash: name → {"at": seconds since 1970, "value": object, or null where dropped}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

from diptych.runtime.discovery import store
from diptych.runtime.task_cancellation import end_task

POLL_S: Final = 0.5
DROPPED_S: Final = 3600.0
"""Time for which a dropped name is kept; a process that was cut off for longer brings it back."""
_STEP_S: Final = 1e-6
_log = logging.getLogger(__name__)

Values = Mapping[str, dict[str, Any]]


class _Entry(NamedTuple):
    """A value and the time it was given; None = dropped."""

    at: float
    value: dict[str, Any] | None

    @property
    def text(self) -> str:
        return json.dumps({"at": self.at, "value": self.value}, sort_keys=True)


class SharedNames:
    """Copy of the names of a scope, this process's own. Used on the event loop's thread.

    Args:
        scope: of those that share names.
        on_change: gets all names and their values when the copy has changed by what others wrote.
    """

    def __init__(
        self,
        redis_url: str,
        scope: str,
        on_change: Callable[[Values], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._redis: Redis = store.connect(redis_url)
        self._key = f"diptych:names:{scope}"
        self._on_change = on_change
        self._clock = wall_clock
        self._entries: dict[str, _Entry] = {}
        self._has_read = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def has_read(self) -> bool:
        """True once the names of others were read; still False in the call of `on_change` that has them."""
        return self._has_read

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
        before = self._entries.get(name)
        at = self._clock() if before is None else max(self._clock(), before.at + _STEP_S)
        self._entries[name] = _Entry(at, value)
        self._wake.set()

    async def _run(self) -> None:
        failed = False
        while True:
            self._wake.clear()
            try:
                await self.synchronise()
                failed = False
            except store.STORE_ERRORS as error:
                if not failed:
                    _log.info("names are not shared with other processes now: %s", type(error).__name__)
                failed = True
                with contextlib.suppress(*store.STORE_ERRORS):
                    await self._redis.connection_pool.disconnect()
            except Exception:
                _log.exception("sharing names failed; trying on")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await (asyncio.sleep(POLL_S) if failed else self._wake.wait())

    async def synchronise(self) -> None:
        """Read what others wrote, and write what they do not know. Raises `store.STORE_ERRORS`."""
        table: Any = await self._redis.hgetall(self._key)
        found = _parsed(table)
        before, oldest = self._values(), self._clock() - DROPPED_S
        for name, entry in found.items():
            mine = self._entries.get(name)
            if mine is None or (mine.at, mine.text) < (entry.at, entry.text):
                self._entries[name] = entry
        forgotten = [name for name, one in self._entries.items() if one.value is None and one.at < oldest]
        for name in forgotten:
            del self._entries[name]
        news = {name: entry for name, entry in self._entries.items() if found.get(name) != entry}
        if (values := self._values()) != before:
            self._on_change(values)
        self._has_read = True
        if news or forgotten:
            async with self._redis.pipeline(transaction=True) as pipe:
                for name in forgotten:
                    pipe.hdel(self._key, name.encode())
                if news:
                    pipe.hset(self._key, mapping={name.encode(): one.text for name, one in news.items()})
                await pipe.execute()

    def _values(self) -> dict[str, dict[str, Any]]:
        return {name: entry.value for name, entry in self._entries.items() if entry.value is not None}


def _parsed(table: Mapping[bytes, bytes]) -> dict[str, _Entry]:
    """Return the entries of a hash; what another program wrote there is passed over."""
    found = {}
    for name, text in table.items():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            data = json.loads(text)
            at, value = data["at"], data["value"]
            if isinstance(at, int | float) and (value is None or isinstance(value, dict)):
                found[name.decode()] = _Entry(float(at), value)
    return found
