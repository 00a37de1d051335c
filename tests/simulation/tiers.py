"""Simulated tiers: memory of a worker, and a folder that all workers share and that outlives them.

The product's mover of blocks and its stack run as they are. Simulated are the folder, its faults, and the
threads: a job runs at the begin or at the end of its time, so that what it read may be old when it returns.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from diptych.engine.kv.tiers.entry import EntryFormat
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.stack import StoredBlock, TierStack
from diptych.engine.kv.tiers.tier import Entry, Moved, Tier
from diptych.engine.kv.tiers.use_order import UseOrder
from tests.simulation.share_group import ShareGroup
from tests.simulation.tier_threads import ThreadExecutor
from tests.simulation.virtual_loop import Host, VirtualLoop, current_host

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

RESCAN_S = 0.3
SLOW_S = (0.2, 0.9)
"""Time of a job while the folder is slow: some loads are late, and some are not."""
_KIND = b"simulated blocks"
_EARLY_SHARE = 0.5


class Folder:
    """Files of all workers, and how they fail."""

    def __init__(self) -> None:
        self.files: dict[bytes, tuple[bytes, bytes]] = {}
        """Parent and entry by key."""
        self.full = self.slow = False
        self.loaded = 0
        """Blocks that workers took from tiers."""
        self.damaged = 0
        """Entries that were found to be damaged."""

    def seconds_of(self, chance: random.Random, name: str) -> float:
        """Return the time of a job of the thread of that name."""
        slow = self.slow and "copy" not in name
        return chance.uniform(*SLOW_S) if slow else chance.uniform(0.0002, 0.004)

    def damage(self, kind: str, number: int) -> bool:
        """Damage a file; False if there is none."""
        if not self.files:
            return False
        keys = list(self.files)
        key = keys[number % len(keys)]
        parent, entry = self.files[key]
        changed = bytearray(entry)
        match kind:
            case "flip":
                changed[-1 - number % 16] ^= 1 << number % 8
            case "cut":
                del changed[len(changed) // 2 :]
            case "swap":
                changed = bytearray(self.files[keys[(number + 1) % len(keys)]][1])
            case _:
                del self.files[key]
                return True
        self.files[key] = parent, bytes(changed)
        return True


class FolderTier:
    """A worker's view of the folder: it knows of others' files when it looks again."""

    name = "disk"
    at_once = 1

    def __init__(self, folder: Folder, quota: int, clock: Callable[[], float]) -> None:
        self._folder, self._quota, self._clock = folder, quota, clock
        self._order = UseOrder(clock)
        self._known: dict[bytes, bytes] = {}
        self.rescan()

    @property
    def used(self) -> int:
        return sum(len(self._folder.files[key][1]) for key in self._known if key in self._folder.files)

    def parent_of(self, key: bytes) -> bytes | None:
        return self._known.get(key)

    def items(self) -> list[tuple[bytes, bytes]]:
        return list(self._known.items())

    def rescan(self) -> Moved:
        before = self._known
        self._known = {key: parent for key, (parent, _) in self._folder.files.items()}
        self._order = UseOrder(self._clock)
        for key, parent in self._known.items():
            self._order.add(key, parent)
        return Moved(self._known.keys() - before.keys(), before.keys() - self._known.keys())

    def get(self, key: bytes) -> bytes | None:
        if key not in self._folder.files:
            self._forget(key)
            return None
        self._order.touch(key)
        return self._folder.files[key][1]

    def put(self, key: bytes, parent: bytes, entry: Entry) -> list[bytes]:
        if self._folder.full:
            raise OSError(28, "no space left on device")
        gone = []
        while self.used + len(entry) > self._quota and (oldest := self._order.oldest()) is not None:
            self.forget([oldest])
            gone.append(oldest)
        self._folder.files[key] = parent, bytes(entry)
        self._known[key] = parent
        self._order.add(key, parent)
        return gone

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._folder.files.pop(key, None)
            self._forget(key)

    def close(self) -> None:
        """Leave the files as they are."""

    def _forget(self, key: bytes) -> None:
        self._known.pop(key, None)
        self._order.remove(key)


class CountingStack(TierStack):
    """A stack that counts what it gave and what it found damaged, over all workers."""

    folder: Folder

    def get(self, key: bytes, parent: bytes) -> StoredBlock | None:
        damaged, found = self.damaged, super().get(key, parent)
        self.folder.damaged += self.damaged - damaged
        self.folder.loaded += found is not None
        return found


def stack_maker(cluster: Cluster) -> Callable[..., TierStack | None]:
    """Return the stand-in for `make_stack`: the tiers of the scenario."""

    def make(
        specs: object,
        fingerprint: object,
        block_bytes: int,
        *,
        reads_shared: bool = False,
        lock: object = None,
    ) -> TierStack | None:
        form = EntryFormat(_KIND, block_bytes)
        makers: dict[str, Callable[[int], Tier]] = {
            "ram": lambda quota: RamTier(quota, cluster.loop.time),
            "disk": lambda quota: FolderTier(cluster.folder, quota, cluster.loop.time),
        }
        tiers = [makers[kind](blocks * form.entry_bytes) for kind, blocks in cluster.scenario.tiers]
        if not tiers:
            return None
        stack = CountingStack(tiers, form, {"disk"} if reads_shared else ())
        stack.folder = cluster.folder
        return stack

    return make


class Executor:
    """A thread of a simulated process. Its jobs take time, one after the other."""

    def __init__(self, cluster: Cluster, host: Host | None, name: str) -> None:
        self._loop: VirtualLoop = cluster.loop
        self._folder = cluster.folder
        self._host, self.name = host, name
        self._random = random.Random(f"{name} {cluster.scenario.network} {host and host.incarnation}")
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None

    def submit(self, run: Callable[..., Any], *args: Any) -> Future[Any]:
        job = _Job(self, run, args)
        self._queue.append(job)
        self._next()
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for job in self._queue:
                job.cancel()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Let all jobs end at once, as a wait for them does."""
        while self._running is not None or self._queue:
            if self._running is None:
                self._next()
            else:
                self._end(self._running)

    def _next(self) -> None:
        while self._running is None and self._queue:
            job = self._queue.popleft()
            if not job.set_running_or_notify_cancel():
                continue
            self._running = job
            if self._random.random() < _EARLY_SHARE:
                job.compute()
            seconds = self._folder.seconds_of(self._random, self.name)
            slowness = 1.0 if self._host is None else self._host.slowness
            self._loop.call_later(seconds * slowness, self._end, job)

    def _end(self, job: _Job) -> None:
        if self._running is not job:
            return  # somebody waited for it
        job.compute()
        self._running = None
        job.settle()
        self._next()


class _Job(Future[Any]):
    def __init__(
        self, executor: Executor | ThreadExecutor, run: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        super().__init__()
        self._executor, self._run, self._args = executor, run, args
        self._found: tuple[Any, BaseException | None] | None = None

    def compute(self) -> None:
        """Run, if it has not yet."""
        if self._found is None:
            try:
                self._found = self._run(*self._args), None
            except Exception as error:
                self._found = None, error

    def settle(self) -> None:
        """Tell those who wait."""
        if self._found is None:
            raise RuntimeError("settled before it ran")
        result, error = self._found
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._executor.finish()
        return super().result(0)


class Threads:
    """Stand-ins for the executors and the event of the movers of all processes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._copiers: dict[Host | None, list[Executor]] = {}

    def executor(self, count: int, name: str) -> Executor | ThreadExecutor:
        """Stand in for ThreadPoolExecutor."""
        host = current_host.get()
        if host is not None and isinstance(self._cluster.here().ranks, ShareGroup):
            return ThreadExecutor(self._cluster, host, name, self._cluster.folder.seconds_of, _Job)
        made = Executor(self._cluster, host, name)
        if name.endswith("copy"):
            self._copiers.setdefault(host, []).append(made)
        return made

    def event(self) -> Any:
        """Stand in for threading.Event: a wait lets the copies of the process end."""
        threads = self

        class Copied:
            def set(self) -> None: ...
            def clear(self) -> None: ...

            def wait(self) -> None:
                for copier in threads._copiers.get(current_host.get(), ()):
                    copier.finish()

        return Copied()
