"""An event loop whose time is a number, shared by simulated processes that can be killed and stopped.

Every callback belongs to the `Host` (the simulated process) in whose context it was scheduled. Callbacks of a
dead host are dropped, as SIGKILL does: no `finally` runs. Those of a stopped host wait until it goes on, as
SIGSTOP does: its timers are late and its sockets fill. Time passes only when no callback is ready.

Each host's monotonic clock starts elsewhere, so that a time that crosses hosts is wrong at once.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any


class Host:
    """A simulated process. ``incarnation`` is its identity: a restarted worker is another host.

    ``worker_id`` is its id in the directory.
    """

    def __init__(self, name: str, incarnation: int, clock_offset: float) -> None:
        self.name = self.worker_id = name
        self.incarnation = incarnation
        self.clock_offset = clock_offset
        self.dead = False
        self.stopped = False
        self.slowness = 1.0
        self.silent_until = 0.0  # until then nothing reaches its machine, and nothing comes from it
        self.held: list[Handle] = []
        self.on_death: list[Callable[[], None]] = []  # called when it ends, by the kernel

    def __repr__(self) -> str:
        return f"{self.name}#{self.incarnation}"


current_host: ContextVar[Host | None] = ContextVar("simulated host", default=None)


class Handle:
    """A scheduled callback, in asyncio's sense."""

    __slots__ = ("_when", "args", "callback", "context", "gone", "host", "network")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None, when: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = copy_context() if context is None else context
        self.host = self.context.get(current_host)
        self.gone = False
        self.network = False
        self._when = when

    def cancel(self) -> None:
        self.gone = True

    def cancelled(self) -> bool:
        return self.gone

    def when(self) -> float:
        return self._when


MOST_AT_ONCE = 20_000
"""Callbacks that may run while no time passes."""


class Livelock(Exception):
    """An endless sequence of callbacks while no time passes."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that the product uses. One thread, no I/O."""

    def __init__(
        self, after_event: Callable[[Host | None], None], failed: Callable[[dict[str, Any]], None]
    ) -> None:
        self.now = 0.0
        self.events = 0
        self.halted = False
        self._left = MOST_AT_ONCE
        self.run_on_thread: Callable[..., asyncio.Future[Any]] | None = None
        self.streams: Any = None  # `tests.simulation.sockets.Sockets`
        self._after_event = after_event
        self._failed = failed
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._closed = False

    # ---- running -------------------------------------------------------------------------------------

    def run(self, *, until: float, over: Callable[[], bool]) -> bool:
        """Run until `over()` (True), or until that time or the last callback (False)."""
        asyncio._set_running_loop(self)
        try:
            while True:
                if self._ready:
                    self._run_ready()
                if self.halted:
                    return False
                if over():
                    return True
                if not self._timers or self._timers[0][0] > until:
                    return False
                if self._timers[0][0] > self.now:
                    self.now, self._left = self._timers[0][0], MOST_AT_ONCE
                while self._timers and self._timers[0][0] <= self.now:
                    self._ready.append(heapq.heappop(self._timers)[2])
        finally:
            asyncio._set_running_loop(None)

    def _run_ready(self) -> None:
        ready = self._ready
        while ready and not self.halted:
            handle = ready.popleft()
            if handle.gone:
                continue
            host = handle.host
            if host is not None:
                if host.dead:
                    continue
                if host.stopped:
                    host.held.append(handle)
                    continue
            self.events += 1
            try:
                handle.context.run(handle.callback, *handle.args)
            except Exception as error:
                self._failed({"message": "a callback raised", "exception": error})
            self._after_event(host)
            self._left -= 1
            if not self._left:
                raise Livelock

    def resume(self, host: Host, *, network_first: bool) -> None:
        """Resume a host, as SIGCONT does: its held callbacks run now, in order of time or messages first."""
        host.stopped = False
        held, host.held = host.held, []
        if network_first:
            held = [h for h in held if h.network] + [h for h in held if not h.network]
        self._ready.extend(held)

    # ---- asyncio's interface -------------------------------------------------------------------------

    def time(self) -> float:
        host = current_host.get()
        return self.now if host is None else self.now + host.clock_offset

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        handle = Handle(callback, args, context, 0.0)
        if not self._closed:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        return self.at(self.now + max(delay, 0.0), callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        host = (context or copy_context()).get(current_host)
        offset = 0.0 if host is None else host.clock_offset
        at = max(when - offset, self.now)
        while at + offset < when:  # rounded down: who waits would be woken too early, for ever
            at += math.ulp(when)
        handle = self.at(at, callback, *args, context=context)
        handle._when = when
        return handle

    def at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Handle:
        """Schedule a callback as `call_at` does, on the simulation's own clock."""
        handle = Handle(callback, args, context, when)
        if not self._closed:
            self._order += 1
            heapq.heappush(self._timers, (when, self._order, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name or "task", context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.append(
            task
        )  # a collected coroutine would run its `finally`, which a killed process does not
        return task

    def start(self, host: Host | None, make: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Run a coroutine as a task of `host`."""
        context = copy_context()
        context.run(current_host.set, host)
        return context.run(lambda: self.create_task(make(), context=context))

    def on_host(self, host: Host, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        """Call a callback of `host` after `delay`: not if it is dead by then, and late if it is stopped."""
        context = copy_context()
        context.run(current_host.set, host)
        self.at(self.now + delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        if self.run_on_thread is None:
            raise NotImplementedError
        return self.run_on_thread(executor, func, *args)

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return self.streams.listen(factory, host)

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return [(2, 1, 0, "", (host, port))]

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await sock.connect_to(address)

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        await sock.send_all(data)

    async def sock_recv(self, sock: Any, n: int) -> bytes:
        return await sock.receive(n)  # type: ignore[no-any-return]

    async def sock_recv_into(self, sock: Any, buffer: Any) -> int:
        data = await sock.receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closed:
            self._failed(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Close the loop: no callback runs any more, whatever the garbage collector wakes."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._tasks.clear()
