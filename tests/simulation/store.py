"""A simulated Redis: the commands that the directory uses, on virtual time, and how it fails."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import redis.exceptions

from tests.simulation.virtual_loop import VirtualLoop, current_host

LATENCY_S = 0.0005
SOCKET_TIMEOUT_S = 0.5


class Store:
    """The server: its data, and its mode."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.mode = "up"  # or down, frozen
        self.latency_s = LATENCY_S
        self._data: dict[str, Any] = {}
        self._expires: dict[str, float] = {}
        self._entries = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._copy: tuple[dict[str, Any], dict[str, float], int] | None = None

    def flush(self) -> None:
        """Delete all keys, as FLUSHALL does."""
        self._data.clear()
        self._expires.clear()

    def remember(self) -> None:
        """Copy the data to a replica that falls behind from now on."""
        self._copy = (copy.deepcopy(self._data), dict(self._expires), self._entries)

    def fail_over(self) -> None:
        """Replace the data by the replica's."""
        if self._copy is not None:
            self._data, self._expires, self._entries = copy.deepcopy(self._copy)

    async def call(self, run: Callable[[], Any]) -> Any:
        """Run a command in one round trip."""
        host = current_host.get()
        if host is not None and host.silent_until > self.loop.now:
            await asyncio.sleep(SOCKET_TIMEOUT_S)
            raise redis.exceptions.TimeoutError("no answer")
        if self.mode == "down":
            await asyncio.sleep(LATENCY_S)
            raise redis.exceptions.ConnectionError("refused")
        if self.mode == "frozen" or self.latency_s >= SOCKET_TIMEOUT_S:
            await asyncio.sleep(SOCKET_TIMEOUT_S)
            run()  # the command ran: only its answer is lost
            raise redis.exceptions.TimeoutError("no answer")
        await asyncio.sleep(self.latency_s)
        return run()

    def get(self, key: str) -> Any:
        if self._expires.get(key, self.loop.now + 1) <= self.loop.now:
            self._data.pop(key, None)
            del self._expires[key]
        return self._data.get(key)

    # ---- commands ------------------------------------------------------------------------------------

    def set(self, key: str, value: Any, nx: bool = False, px: int | None = None) -> bool | None:
        if nx and self.get(key) is not None:
            return None
        self._data[key] = value.encode() if isinstance(value, str) else value
        self._expires.pop(key, None)
        if px is not None:
            self._expires[key] = self.loop.now + px / 1000
        return True

    def delete(self, *keys: str) -> int:
        return sum(self._data.pop(key, None) is not None for key in keys)

    def incr(self, key: str) -> int:
        self._data[key] = str(int(self.get(key) or 0) + 1).encode()
        return int(self._data[key])

    def expire(self, key: str, seconds: float) -> bool:
        if self.get(key) is None:
            return False
        self._expires[key] = self.loop.now + seconds
        return True

    def pexpire(self, key: str, milliseconds: int) -> bool:
        return self.expire(key, milliseconds / 1000)

    def mget(self, keys: list[str]) -> list[Any]:
        return [self.get(key) for key in keys]

    def sadd(self, key: str, *members: str) -> None:
        self._data[key] = {**(self.get(key) or {}), **dict.fromkeys(m.encode() for m in members)}

    def srem(self, key: str, *members: str) -> None:
        for member in members:
            (self.get(key) or {}).pop(member.encode(), None)

    def smembers(self, key: str) -> list[bytes]:
        return list(self.get(key) or {})

    def hset(self, key: str, items: list[Any] | None = None, mapping: dict[bytes, str] | None = None) -> None:
        table = self.get(key) or {}
        if items is not None:
            table.update(zip(items[::2], (str(v).encode() for v in items[1::2]), strict=True))
        table.update({name: value.encode() for name, value in (mapping or {}).items()})
        self._data[key] = table

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return dict(self.get(key) or {})

    def time(self) -> tuple[int, int]:
        return int(self.loop.now), int(self.loop.now % 1 * 1e6)

    def hdel(self, key: str, *fields: bytes) -> None:
        for name in fields:
            (self.get(key) or {}).pop(name, None)

    def hget(self, key: str, name: str) -> Any:
        return (self.get(key) or {}).get(name.encode())

    def hscan(self, key: str, cursor: int, count: int = 10) -> tuple[int, dict[bytes, bytes]]:
        return 0, dict(self.get(key) or {})

    def xadd(self, key: str, fields: dict[str, Any], maxlen: int = 0, approximate: bool = True) -> None:
        self._entries += 1
        raw = {k.encode(): v if isinstance(v, bytes) else str(v).encode() for k, v in fields.items()}
        stream = self._data[key] = [*(self.get(key) or []), (b"%d-0" % self._entries, raw)]
        del stream[:-maxlen]
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    def xrevrange(self, key: str, count: int = 1) -> list[Any]:
        return (self.get(key) or [])[-count:][::-1]

    def xread(self, streams: dict[str, str], count: int = 1) -> list[Any]:
        ((key, position),) = streams.items()
        after = int(position.split("-")[0])
        found = [entry for entry in self.get(key) or [] if int(entry[0].split(b"-")[0]) > after]
        return [[key.encode(), found[:count]]] if found else []

    async def wait(self, milliseconds: int) -> None:
        """Wait until an entry is added to a stream, at most for so long."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        timer = asyncio.get_running_loop().call_later(
            milliseconds / 1000, lambda: waiting.done() or waiting.set_result(None)
        )
        await waiting
        timer.cancel()


class Pipeline:
    """A transaction: all its commands at one moment, in one round trip.

    Between `watch` and `multi` commands run at once; the transaction then fails if the watched key changed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._commands: list[Callable[[], Any]] = []
        self._watched: tuple[str, Any] | None = None
        self._at_once = False

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()

    def __getattr__(self, name: str) -> Any:
        command = getattr(self._store, name)

        def queue(*args: Any, **options: Any) -> Any:
            if self._at_once:
                return self._store.call(lambda: command(*args, **options))
            self._commands.append(lambda: command(*args, **options))
            return self

        return queue

    async def watch(self, key: str) -> None:
        self._watched = key, await self._store.call(lambda: copy.deepcopy(self._store.get(key)))
        self._at_once = True

    def multi(self) -> None:
        self._at_once = False

    async def execute(self) -> list[Any]:
        commands, watched = list(self._commands), self._watched
        self._commands.clear()
        self._watched = None

        def run() -> list[Any]:
            if watched is not None and self._store.get(watched[0]) != watched[1]:
                raise redis.exceptions.WatchError("the key was changed")
            return [command() for command in commands]

        return await self._store.call(run)  # type: ignore[no-any-return]


class StoreClient:
    """A `redis.asyncio.Redis`, as far as the directory uses one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.connection_pool = self

    async def disconnect(self) -> None: ...
    async def aclose(self) -> None: ...

    def pipeline(self, transaction: bool = True) -> Pipeline:
        return Pipeline(self._store)

    async def xread(self, streams: dict[str, str], count: int = 1, block: int = 0) -> Any:
        found = await self._store.call(lambda: self._store.xread(streams, count))
        if not found and block:
            await self._store.wait(block)
            found = await self._store.call(lambda: self._store.xread(streams, count))
        return found

    def __getattr__(self, name: str) -> Any:
        command = getattr(self._store, name)

        async def run(*args: Any, **options: Any) -> Any:
            return await self._store.call(lambda: command(*args, **options))

        return run
