"""Threads of a mover of blocks in a group: they wait for other ranks, as the loop must not."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tests.simulation.virtual_loop import Host
from tests.simulation.virtual_threads import Condition, Queue

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


class ThreadExecutor:
    """Stand-in for a ThreadPoolExecutor of one thread, which is one of the simulated process."""

    def __init__(
        self,
        cluster: Cluster,
        host: Host,
        name: str,
        seconds: Callable[[random.Random, str], float],
        make_job: Callable[..., Any],
    ) -> None:
        """Take what says how long a job takes, and what makes one of its function and arguments."""
        self._threads, self._loop, self.name = cluster.threads, cluster.loop, name
        self._random = random.Random(f"{name} {cluster.scenario.network} {host.incarnation}")
        self._seconds, self._make_job = seconds, make_job
        self._queue = Queue(cluster.threads)
        self._changed = Condition(cluster.threads)
        self._unfinished: list[Future[Any]] = []
        cluster.threads.start(host, self._work)

    def submit(self, run: Callable[..., Any], *args: Any) -> Future[Any]:
        job: Future[Any] = self._make_job(self, run, args)
        self._unfinished.append(job)
        self._queue.put(job)
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for job in self._unfinished:
                job.cancel()  # not the one that runs
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait, on a thread, until all jobs have ended."""
        with self._changed:
            while self._unfinished:
                self._changed.wait()

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            if job.set_running_or_notify_cancel():
                self._threads.sleep(self._seconds(self._random, self.name))
                job.compute()
            self._loop.call_soon(self._end, job)

    def _end(self, job: Any) -> None:
        if not job.cancelled():
            job.settle()
        with self._changed:
            self._unfinished.remove(job)
            self._changed.notify_all()
