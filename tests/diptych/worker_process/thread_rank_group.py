"""The other ranks of a group as threads behind pipes, as the backends of rank 0 see them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.step_plan import StepPlan
from diptych.worker_process.group.group_backend import GroupBackend
from diptych.worker_process.group.native_group_backend import NativeGroupBackend
from diptych.worker_process.group.orders import Planned
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_steps import carry_out
from tests.diptych.engine.parallel.native_ranks import NativeGroup

MEMORY = 7
Change = Callable[[StepPlan], StepPlan]


class Memories:
    """The memory of a test, under its number."""

    def __init__(self, memory: KVMemory) -> None:
        self.mapped = {MEMORY: memory}

    def number_of(self, memory: KVMemory) -> int:
        assert memory is self.mapped[MEMORY]
        return MEMORY


class ThreadRankGroup:
    """All ranks but the first; `change` is made of every plan, for controls."""

    def __init__(self, ranks: Any, memory: KVMemory, change: Change | None) -> None:
        self.memories, self.stop_word = Memories(memory), getattr(ranks, "stop_word", None)
        self._change = change
        self._pipes: list[Connection[Any, Any]] = []
        self._threads = []
        for backend in ranks.backends[1:]:
            ours, theirs = Pipe()
            self._pipes.append(ours)
            self._threads.append(threading.Thread(target=self._follow, args=(backend, theirs)))
            self._threads[-1].start()

    def _follow(self, backend: Any, plans: Connection[Any, Any]) -> None:
        adapters = RankAdapters(backend)
        while (order := plans.recv()) is not None:
            carry_out(order, backend, cast(Any, self.memories), adapters, plans)

    def begin_step(self, plan: StepPlan) -> None:
        self.send_order(plan if self._change is None else self._change(plan))

    def send_order(self, order: Planned) -> None:
        for pipe in self._pipes:
            pipe.send(order)

    def end_step(self) -> None:
        for pipe in self._pipes:
            pipe.recv_bytes()

    def fail(self, error: BaseException) -> NoReturn:
        raise error

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for thread in self._threads:
            thread.join(60)


@contextlib.contextmanager
def rank_zero(
    ranks: Any, memory: KVMemory, change: Change | None = None
) -> Iterator[GroupBackend | NativeGroupBackend]:
    """Yield the backend of rank 0 of a ThreadGroup or a NativeGroup, whose steps lie in `memory`."""
    group = ThreadRankGroup(ranks, memory, change)
    try:
        if isinstance(ranks, NativeGroup):
            yield NativeGroupBackend(ranks.backends[0], cast(Any, group))
        else:
            yield GroupBackend(ranks.backends[0], cast(Any, group))
    finally:
        group.end()
