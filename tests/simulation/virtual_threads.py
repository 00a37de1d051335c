"""Threads of simulated processes: each runs alone until it waits, and what it waits for is virtual time.

The product's code that blocks (on locks, queues, sockets, pipes) runs as it is, on a thread of the kernel
whose turn comes when the loop calls it as a callback of its process. So threads of a dead process never run
again, those of a stopped one wait, and one seed has one order of turns.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from types import SimpleNamespace
from typing import Any

from tests.simulation.virtual_loop import Host, VirtualLoop, current_host

TURN_S = 0.0002
"""Most seconds from the moment at which a thread may go on to that at which it does."""


class RunOver(BaseException):
    """End of the run, raised in threads that still wait: no handler of the product catches it."""


class VirtualThread:
    """A thread of the simulated process in whose context it was made."""

    def __init__(self, threads: VirtualThreads, run: Callable[[], object]) -> None:
        self._threads, self._run = threads, run
        self._turn = threading.Semaphore(0)
        self._wakes: Context = copy_context()
        self._started = False
        self._waits = self._woken = False
        self._wait_number = 0

    def start(self) -> None:
        """Let it begin soon."""
        self._threads.alive[self] = None
        self._go_on_soon()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `wake`, on this thread; return False where the time came first."""
        loop = self._threads.loop
        if self._threads.over:
            raise RunOver
        self._wait_number += 1
        self._waits = True
        if timeout is not None:
            loop.at(loop.now + timeout, self._time_is_up, self._wait_number, context=self._wakes)
        self._threads.give_turn()
        self._turn.acquire()
        if self._threads.over:
            raise RunOver
        return self._woken

    def wake(self) -> None:
        """Let it go on if it waits."""
        if self._waits:
            self._waits, self._woken = False, True
            self._go_on_soon()

    def end(self) -> None:
        """End it where it waits, once the run is over."""
        if self._started:
            self._take_turn()

    def _go_on_soon(self) -> None:
        loop = self._threads.loop
        loop.at(loop.now + self._threads.chance() * TURN_S, self._take_turn, context=self._wakes)

    def _time_is_up(self, number: int) -> None:
        if self._waits and number == self._wait_number:
            self._waits = self._woken = False
            self._take_turn()

    def _take_turn(self) -> None:
        """Run the thread, from the loop, until it waits or ends."""
        if self._started:
            turn: Callable[[], object] = self._turn.release
        else:
            self._started = True
            context = self._wakes.copy()
            turn = threading.Thread(target=context.run, args=(self._whole_run,), daemon=True).start
        self._threads.run_turn(self, turn)

    def _whole_run(self) -> None:
        try:
            self._run()
        except RunOver:
            pass
        except Exception as error:
            self._threads.failed({"message": "a thread raised", "exception": error})
        finally:
            del self._threads.alive[self]
            self._threads.give_turn()


class VirtualThreads:
    """All threads of a run, and what stands in for `threading` and `queue`."""

    def __init__(self, loop: VirtualLoop, seed: object, failed: Callable[[dict[str, Any]], None]) -> None:
        self.loop, self.failed = loop, failed
        self.alive: dict[VirtualThread, None] = {}
        self.over = False
        self.chance = random.Random(f"threads {seed}").random
        self._back = threading.Semaphore(0)
        self._current: VirtualThread | None = None
        self.threading = SimpleNamespace(
            Thread=self._thread,
            Lock=lambda: Lock(self),
            Condition=lambda: Condition(self),
            BoundedSemaphore=lambda count: Slots(count),
        )
        self.queue = SimpleNamespace(SimpleQueue=lambda: Queue(self))

    @property
    def current(self) -> VirtualThread:
        """The thread that runs. Raises RuntimeError on the loop, which must never wait."""
        if self._current is None:
            raise RuntimeError("an event loop waits as a thread may")
        return self._current

    def start(self, host: Host, run: Callable[[], object]) -> None:
        """Start a thread of a process."""
        context = copy_context()
        context.run(current_host.set, host)
        context.run(lambda: VirtualThread(self, run).start())

    def sleep(self, seconds: float) -> None:
        """Let time pass for the thread that runs."""
        self.current.wait(seconds)

    def stay(self) -> None:
        """End the thread that runs, with its process; on the loop, do nothing."""
        if self._current is not None:
            self._current.wait()

    def run_turn(self, thread: VirtualThread, turn: Callable[[], object]) -> None:
        """Let `turn` start a thread's turn, and wait for its end."""
        self._current = thread
        turn()
        self._back.acquire()
        self._current = None

    def give_turn(self) -> None:
        """Return the turn to the loop."""
        self._back.release()

    def close(self) -> None:
        """End all threads; the loop is closed."""
        self.over = True
        for thread in list(self.alive):
            thread.end()

    def _thread(
        self, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "", daemon: bool = True
    ) -> VirtualThread:
        return VirtualThread(self, lambda: target(*args))


class Lock:
    """Stand-in for `threading.Lock`."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads
        self._held = False
        self._waiting: deque[VirtualThread] = deque()

    def acquire(self) -> None:
        while self._held:
            self._waiting.append(self._threads.current)
            self._threads.current.wait()
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._waiting:
            self._waiting.popleft().wake()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """Stand-in for `threading.Condition`."""

    def __init__(self, threads: VirtualThreads) -> None:
        super().__init__(threads)
        self._asleep: list[VirtualThread] = []

    def wait(self) -> None:
        thread = self._threads.current
        self._asleep.append(thread)
        self.release()
        thread.wait()
        self.acquire()

    def notify_all(self) -> None:
        asleep, self._asleep = self._asleep, []
        for thread in asleep:
            thread.wake()


class Slots:
    """Stand-in for `threading.BoundedSemaphore`, which nobody waits for."""

    def __init__(self, count: int) -> None:
        self._left = count

    def acquire(self, blocking: bool = True) -> bool:
        if not self._left:
            return False
        self._left -= 1
        return True

    def release(self) -> None:
        self._left += 1


class Queue:
    """Stand-in for `queue.SimpleQueue`."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads
        self._items: deque[Any] = deque()
        self._waiting: deque[VirtualThread] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._waiting.popleft().wake()

    put_nowait = put

    def get(self, timeout: float | None = None) -> Any:
        """Return the next item. Raises TimeoutError."""
        while not self._items:
            thread = self._threads.current
            self._waiting.append(thread)
            if not thread.wait(timeout) and not self._items:
                self._waiting.remove(thread)
                raise TimeoutError("timed out")
        return self._items.popleft()
