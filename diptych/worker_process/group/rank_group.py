"""The other ranks of this worker's group: processes that live and die with this one.

    started  → each waits for its StartRank; this process checks model and settings first
    joined   → all share one exchange
    loaded   → each holds its share of the weights and waits for plans
    over     → one process of the group died, and all others follow: they cannot compute without it

The kernel kills the ranks when this process dies, and they also see the end of a pipe. The death of a rank is
seen by its pidfd on the event loop, which goes on while a step waits for numbers that will never come.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.communicator import GroupBroken
from diptych.engine.parallel.gloo_communicator import BUILD_S, LOOPBACK
from diptych.engine.parallel.pipeline import Links
from diptych.engine.parallel.shared_memory_communicator import exchange_file
from diptych.engine.parallel.stages import Grid
from diptych.engine.parallel.step_plan import StepPlan
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel.ways import ways_of
from diptych.engine.parallel_model import join_group
from diptych.runtime.process import leave
from diptych.runtime.python_module import module_command
from diptych.runtime.settings import StartupError
from diptych.worker_process.group.orders import RankFailed, RankReady, StartRank
from diptych.worker_process.group.shared_memories import SharedMemories
from kvtransfer.transports.base import Welcome
from kvtransfer.transports.process_group import listen_for_store, open_store

RANK_MODULE = "diptych.worker_process.group.rank_program"
_DIED = 1
_log = logging.getLogger(__name__)


class RankCannotStart(StartupError):
    """A rank that could not load its share of the model."""


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    plans: Connection[Any, Any]
    control: Connection[Any, Any]


class RankGroup:
    """Ranks 1 and up of a group, seen from rank 0."""

    def __init__(self, grid: Grid, log_name: str, log_level: str) -> None:
        """Start the other processes of `grid`. Call it on the event loop, in the main thread: the kernel's
        signal at the death of a parent follows the thread that started the child.
        """
        self.grid, self.size = grid, grid.size
        self.weight_bytes: Sequence[int] = [0] * grid.size
        """Bytes of the weights of each process, this one first; 0 until they are loaded."""
        self._stop_fd = StopWord.file()
        self.stop_word = StopWord(self._stop_fd)
        self.stop_word.reset()
        self._sums = [os.memfd_create("diptych-sums", os.MFD_CLOEXEC) for _ in range(grid.stages)]
        self._exchanges = [(way, exchange_file(len(way.members))) for way in ways_of(grid)]
        self._death, self._alive = os.pipe()
        """Pipe whose only writing end this process holds: its closing ends the ranks."""
        names = [f"{log_name}/rank-{number}" for number in range(1, grid.size)]
        self._ranks = [self._start(number, name, log_level) for number, name in enumerate(names, start=1)]
        self.memories = SharedMemories([(rank.process.pid, rank.control) for rank in self._ranks])
        loop = asyncio.get_running_loop()
        for rank in self._ranks:
            loop.add_reader(os.pidfd_open(rank.process.pid), partial(self._on_death, rank))

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the other ranks, in order."""
        return [rank.process.pid for rank in self._ranks]

    # -- the start

    def join(self, order: StartRank) -> Links:
        """Send each rank its `order`, and return this rank's ends of the group once all have joined.

        Raises GroupBroken, TransportError, OSError.
        """
        listener, port = listen_for_store(LOOPBACK)
        for rank in self._ranks:
            rank.control.send(replace(order, number=rank.number, store_port=port))
        return join_group(
            0,
            self.grid,
            self._exchange_fds(0),
            lambda: open_store(LOOPBACK, port, listener, BUILD_S),
            torch.device(order.device),
        )

    def wait_loaded(self) -> list[int]:
        """Wait until every rank has its weights; return their bytes. Raises RankCannotStart, GroupBroken."""
        sizes = []
        for rank in self._ranks:
            try:
                answer: RankReady | RankFailed = rank.control.recv()
            except (OSError, EOFError) as error:
                raise GroupBroken(f"rank {rank.number} is gone") from error
            if isinstance(answer, RankFailed):
                raise RankCannotStart(f"rank {rank.number}: {answer.why}")
            sizes.append(answer.weight_bytes)
        return sizes

    def sums_of(self, number: int) -> int:
        """Return the file in memory in which the ranks of a process' stage exchange sums in a native step;
        -1 where the stage is that process.
        """
        stage, _ = self.grid.place(number)
        return self._sums[stage] if self.grid.ranks > 1 else -1

    # -- steps

    def begin_step(self, plan: StepPlan) -> None:
        """Have the other ranks compute their share of a step. Raises OSError."""
        for rank in self._ranks:
            rank.plans.send(plan)

    def end_step(self) -> None:
        """Wait until every rank has written its share, which torch computes. Raises EOFError, OSError."""
        for rank in self._ranks:
            rank.plans.recv_bytes()

    async def map_pool(self, memory: KVMemory, welcome: Welcome, tokens: Sequence[bytes]) -> None:
        """See `WriterRanks.map_pool`."""
        welcomes = [replace(welcome, token=token, tls=None) for token in tokens]
        await asyncio.to_thread(self.memories.register, memory, welcomes)

    # -- the end

    def fail(self, error: BaseException) -> NoReturn:
        """End this process, and with it the ranks: a step broke off, and they are out of step."""
        _log.critical("the group of %d ranks ends: %r", self.size, error)
        leave(_DIED)

    def _on_death(self, rank: _Rank) -> None:
        _log.critical("rank %d (pid %d) died: its group ends", rank.number, rank.process.pid)
        leave(_DIED)

    def _exchange_fds(self, number: int) -> list[int]:
        """Return the files of the exchanges that a process takes part in, in the order in which it joins."""
        return [fd for way, fd in self._exchanges if number in way.members]

    def _start(self, number: int, name: str, log_level: str) -> _Rank:
        ends = [socket.socketpair(), socket.socketpair()]
        theirs = [their.fileno() for _, their in ends]
        command = [*module_command(RANK_MODULE), name, log_level]
        fds = (*theirs, self._stop_fd, self._death, self._sums[self.grid.place(number)[0]])
        fds = (*fds, *self._exchange_fds(number))
        process = subprocess.Popen([*command, *map(str, fds)], pass_fds=fds, stdin=subprocess.DEVNULL)
        for _, their in ends:
            their.close()
        plans, control = (Connection(our.detach()) for our, _ in ends)
        return _Rank(number, process, plans, control)
