"""The other ranks of this worker's group: processes that live and die with this one.

    started  → each waits for its StartRank; this process checks model and settings first
    joined   → all share one exchange
    loaded   → each holds its share of the weights and waits for plans
    over     → one process of the group died, and all others follow: they cannot compute without it

The kernel kills the ranks when this process dies, and they also see the end of a pipe. The death of a rank is
seen by its pidfd on the event loop, which goes on while a step waits for numbers that will never come.

Ranks on other hosts join before the start orders (rendezvous.py), and have the last numbers. Both ends see
the end of a connection, or within seconds that the other host does not answer any more.

Ranks of this host map the memories of rank 0, or on GPUs have their own, as those of other hosts have.
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

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.communicator import GroupBroken
from diptych.engine.parallel.gloo_communicator import BUILD_S, LOOPBACK
from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import KVShare
from diptych.engine.parallel.pipeline import Links
from diptych.engine.parallel.shared_memory_communicator import exchange_file
from diptych.engine.parallel.stages import Grid
from diptych.engine.parallel.step_plan import StepPlan
from diptych.engine.parallel.stop_word import RunToEnd, StopWord
from diptych.engine.parallel.ways import ways_of
from diptych.engine.parallel_model import join_group
from diptych.runtime.process import leave
from diptych.runtime.python_module import module_command
from diptych.runtime.settings import StartupError
from diptych.worker_process.group.orders import (
    CONNECTIONS,
    AdapterOrder,
    DropRecording,
    Planned,
    RankFailed,
    RankReady,
    Recording,
    StartRank,
)
from diptych.worker_process.group.rank_devices import rank_devices
from diptych.worker_process.group.rank_memory import RankMemory
from diptych.worker_process.group.remote_rank import RemoteRank
from diptych.worker_process.group.rendezvous import Ends, Joined, Rendezvous
from diptych.worker_process.group.shared_memories import SharedMemories
from diptych.worker_process.group.spread_blocks import SpreadShares
from kvtransfer.transports.base import CPU, Welcome, gpu_uuid
from kvtransfer.transports.in_place_by_rank import rank_welcome
from kvtransfer.transports.process_group import listen_for_store, open_store

RANK_MODULE = "diptych.worker_process.group.rank_program"
_DIED = 1
_log = logging.getLogger(__name__)


class RankCannotStart(StartupError):
    """A rank that could not load its share of the model."""


class _MappingRank:
    """A rank of this host that maps the memories of rank 0."""

    def __init__(self, ends: Ends) -> None:
        self.plans, self.control = ends["plans"], ends["control"]

    def send_plan(self, planned: Planned) -> None:
        """Send what the rank does next. Raises OSError."""
        self.plans.send(planned)


@dataclass(frozen=True, slots=True)
class OtherHosts:
    """Ranks of a group that run on other hosts, and where they join it."""

    count: int
    rendezvous: Rendezvous


class RankGroup:
    """Ranks 1 and up of a group, seen from rank 0."""

    def __init__(
        self,
        grid: Grid,
        log_name: str,
        log_level: str,
        other_hosts: OtherHosts | None = None,
        *,
        own_memories: bool = False,
        share_host: str = LOOPBACK,
    ) -> None:
        """Start the processes of `grid` that run on this host. Call it on the event loop, in the main thread:
        the kernel's signal at the death of a parent follows the thread that started the child.

        Args:
            own_memories: whether each has memories of its own, and rank 0 its own share alone.
            share_host: address at which they take shares of blocks then.
        """
        self.grid, self.size = grid, grid.size
        self._other_hosts, self._own_memories, self._share_host = other_hosts, own_memories, share_host
        self._remote: list[RemoteRank] = []
        self._lives: list[Connection[Any, Any]] = []
        """Connections whose end is that of a rank of another host; collected, they would end here."""
        self.holders: Holders | None = None
        """See `WriterRanks.holders`; known once all ranks have joined."""
        self.devices: Sequence[str] = ()
        """See `WriterRanks.devices`; known once all ranks have loaded."""
        self._device = CPU
        self.weight_bytes: Sequence[int] = [0] * grid.size
        """Bytes of the weights of each process, this one first; 0 until they are loaded."""
        self.rank_memory: Sequence[RankMemory] = ()
        """Uses of the memory of each process, this one first; none until the blocks are known."""
        self._stop_fd = StopWord.file()
        self.stop_word = StopWord(self._stop_fd) if other_hosts is None else RunToEnd()
        self.stop_word.reset()
        self._sums = [os.memfd_create("diptych-sums", os.MFD_CLOEXEC) for _ in range(grid.stages)]
        self._exchanges = (
            [(way, exchange_file(len(way.members))) for way in ways_of(grid)] if other_hosts is None else []
        )
        self._death, self._alive = os.pipe()
        """Pipe whose only writing end this process holds: its closing ends the ranks."""
        here = grid.size - (0 if other_hosts is None else other_hosts.count)
        names = [f"{log_name}/rank-{number}" for number in range(1, here)]
        self._loop = asyncio.get_running_loop()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks = [self._start(number, name, log_level) for number, name in enumerate(names, start=1)]
        mapping = [] if own_memories else zip(self.pids, (rank.control for rank in self._ranks), strict=True)
        self.memories = SharedMemories(list(mapping))

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the other ranks of this host, in order."""
        return [process.pid for process in self._processes]

    @property
    def remote(self) -> Sequence[RemoteRank]:
        """The ranks on other hosts, in order, which come after those of this host."""
        return self._remote

    # -- the start

    def join(self, order: StartRank, shares: Sequence[KVShare]) -> Links:
        """Send each rank its `order`, and return this rank's ends of the group once all have joined.

        `shares` are those of the processes in each block.

        Raises GroupBroken, TransportError, OSError.
        """
        host = None if self._other_hosts is None else self._other_hosts.rendezvous.host
        listener, port = listen_for_store(host or LOOPBACK)
        order = replace(order, store_port=port)
        if host is not None:
            order = replace(order, store_host=host, host=host, across_hosts=True)
            self._await_hosts()
        self._know_holders(shares, torch.device(order.device))
        here = len(self._ranks) + 1
        devices = rank_devices(order.device, [LOOPBACK] * here + [rank.host for rank in self._remote])
        for number, rank in enumerate(self._others, start=1):
            rank.control.send(self._order_for(replace(order, number=number, device=devices[number]), rank))
        return join_group(
            0,
            self.grid,
            self._exchange_fds(0),
            lambda: open_store(order.store_host, port, listener, BUILD_S),
            torch.device(order.device),
            host,
        )

    def _order_for(self, order: StartRank, rank: _MappingRank | RemoteRank) -> StartRank:
        """Return the order for a rank that has memories of its own, or not, here or elsewhere."""
        if isinstance(rank, _MappingRank):
            return order
        order = replace(order, holder=self._holder_ranks.index(rank) + 1)
        if rank in self._remote:
            return replace(order, host=rank.host, share_host=rank.host)
        return replace(order, share_host=self._share_host)

    @property
    def _holder_ranks(self) -> list[RemoteRank]:
        return [rank for rank in self._others if isinstance(rank, RemoteRank)]

    def _know_holders(self, shares: Sequence[KVShare], device: torch.device) -> None:
        """Note who holds which shares of blocks, where not all processes have one memory."""
        if not (ranks := self._holder_ranks):
            return
        here, self._device = len(shares) - len(ranks), device
        self.holders = (tuple(shares[:here]), *((share,) for share in shares[here:]))
        others = list(zip(ranks, shares[here:], strict=True))
        self.memories.add_holders(
            [rank.control for rank in ranks],
            lambda memory, number: SpreadShares(memory, number, shares[:here], others, self.devices),
            shares[0] if self._own_memories else None,
            device,
        )

    def _await_hosts(self) -> None:
        """Wait until all ranks of other hosts have joined. Raises GroupBroken."""
        if self._other_hosts is None:
            return
        meeting, count = self._other_hosts.rendezvous, self._other_hosts.count
        _log.info("waiting for %d ranks of other hosts at %s:%d", count, meeting.host, meeting.port)
        for number, joined in enumerate(meeting.accept(count), start=len(self._ranks) + 1):
            self._remote.append(RemoteRank(joined, self.fail))
            self._lives.append(joined.ends["life"])
            died = partial(self._on_death, number, f"pid {joined.pid} on {joined.host}")
            self._loop.call_soon_threadsafe(self._loop.add_reader, joined.ends["life"].fileno(), died)

    def wait_loaded(self) -> list[int]:
        """Wait until every rank has its weights; return their bytes. Raises RankCannotStart, GroupBroken."""
        sizes, holding = [], self._holder_ranks
        devices = [gpu_uuid(self._device)]
        for number, rank in enumerate(self._others, start=1):
            try:
                answer: RankReady | RankFailed = rank.control.recv()
            except (OSError, EOFError) as error:
                raise GroupBroken(f"rank {number} is gone") from error
            if isinstance(answer, RankFailed):
                raise RankCannotStart(f"rank {number}: {answer.why}")
            sizes.append(answer.weight_bytes)
            if rank in holding:
                devices.append(answer.device)
        self.devices = devices
        return sizes

    def measure_memory(self, layout: KVLayout, num_blocks: int) -> None:
        """Note and log what each rank's memory is taken by, where this worker has `num_blocks` blocks.

        Blocks, so not on the event loop of a worker that serves. Raises GroupBroken.
        """
        self.rank_memory = self.memories.measure(layout, num_blocks, self.weight_bytes[0])
        for number, memory in enumerate(self.rank_memory):
            _log.info("memory of rank %d in %s", number, memory.describe())

    def sums_of(self, number: int) -> int:
        """Return the file in memory in which the ranks of a process' stage exchange sums in a native step;
        -1 where the stage is that process.
        """
        stage, _ = self.grid.place(number)
        return self._sums[stage] if self.grid.ranks > 1 else -1

    # -- steps

    def begin_step(self, plan: StepPlan | Recording) -> None:
        """Have the other ranks compute their share of a step, or make a recording. Raises OSError."""
        for rank in self._others:
            rank.send_plan(plan)

    def send_order(self, order: AdapterOrder | DropRecording) -> None:
        """Have the other ranks do something between two steps. Raises OSError."""
        for rank in self._others:
            rank.send_plan(order)

    def end_step(self) -> None:
        """Wait until every rank has written its share, which torch computes. Raises EOFError, OSError."""
        for rank in self._others:
            rank.plans.recv_bytes()

    def end_recording(self) -> str | None:
        """Wait until every rank has made a recording; return which one could not, and why.

        Raises EOFError, OSError.
        """
        answers = [rank.plans.recv_bytes().decode() for rank in self._others]
        return next((f"rank {number}: {why}" for number, why in enumerate(answers, start=1) if why), None)

    async def map_pool(self, memory: KVMemory, welcome: Welcome, tokens: Sequence[bytes]) -> None:
        """See `WriterRanks.map_pool`."""
        if welcome.holders:
            welcomes = [rank_welcome(welcome, number) for number in range(1, len(welcome.holders))]
        else:
            welcomes = [replace(welcome, token=token, tls=None) for token in tokens]
        await asyncio.to_thread(self.memories.register, memory, welcomes)

    # -- the end

    def fail(self, error: BaseException) -> NoReturn:
        """End this process, and with it the ranks: a step broke off, and they are out of step."""
        _log.critical("the group of %d ranks ends: %r", self.size, error)
        leave(_DIED)

    @property
    def _others(self) -> list[_MappingRank | RemoteRank]:
        return [*self._ranks, *self._remote]

    def _on_death(self, number: int, process: str) -> None:
        _log.critical("rank %d (%s) died: its group ends", number, process)
        leave(_DIED)

    def _exchange_fds(self, number: int) -> list[int]:
        """Return the files of the exchanges that a process takes part in, in the order in which it joins."""
        return [fd for way, fd in self._exchanges if number in way.members]

    def _start(self, number: int, name: str, log_level: str) -> _MappingRank | RemoteRank:
        pairs = {kind: socket.socketpair() for kind in CONNECTIONS}
        theirs = [their.fileno() for _, their in pairs.values()]
        command = [*module_command(RANK_MODULE), name, log_level]
        fds = (*theirs, self._stop_fd, self._death, self._sums[self.grid.place(number)[0]])
        fds = (*fds, *self._exchange_fds(number))
        process = subprocess.Popen([*command, *map(str, fds)], pass_fds=fds, stdin=subprocess.DEVNULL)
        for _, their in pairs.values():
            their.close()
        ends: Ends = {kind: Connection(our.detach()) for kind, (our, _) in pairs.items()}
        died = partial(self._on_death, number, f"pid {process.pid}")
        self._loop.add_reader(os.pidfd_open(process.pid), died)
        self._processes.append(process)
        if self._own_memories:
            return RemoteRank(Joined(LOOPBACK, process.pid, ends), self.fail)
        return _MappingRank(ends)
