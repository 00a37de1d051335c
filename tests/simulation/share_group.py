"""A simulated group whose ranks have memories of their own: each on a host, with the product's own threads.

    real        rank 0's links to the other ranks and what it orders by them, the ranks' service of shares,
                their listeners and pushes (diptych/worker_process/group), and both ends of tcp by rank
    stand-ins   sockets, pipes, locks and threads; how a group starts; the arithmetic of a step

A step goes as in the product: rank 0 sends a plan, each rank reads its cells once it has carried out what was
ordered before, all meet, each writes what it holds, and rank 0 waits until the last one has.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from diptych.engine.batch import AbortWords, SequenceStep, check_batch
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import KVShare
from diptych.engine.parallel.stages import Grid
from diptych.engine.parallel.step_plan import StepPlan, follow_plan, make_plan
from diptych.worker_process.group.holder_program import serve_holder
from diptych.worker_process.group.remote_rank import RemoteRank
from diptych.worker_process.group.rendezvous import Joined
from diptych.worker_process.group.share_memory import ShareMemory
from diptych.worker_process.group.spread_blocks import SpreadShares
from kvtransfer.transports.base import CPU, TransportError, Welcome
from kvtransfer.transports.pool_memory import PoolMemory
from tests.simulation.kv_cells import CellRunner, CellsDiffer, Entries, HeldCells, agreed, dealt_shares
from tests.simulation.model import VOCABULARY, SimulatedModel, extend
from tests.simulation.ranks import KERNEL_S, LAST_BREATH_S, pid_of
from tests.simulation.scenario import GroupShape
from tests.simulation.thread_sockets import PipeEnd, make_pipe
from tests.simulation.virtual_loop import Host
from tests.simulation.virtual_threads import Condition, Queue

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster, Machine

_ENDS = ("control", "plans", "blocks", "shares")


class Meeting:
    """The sums that ranks exchange in a step, as far as they matter here: what each has read."""

    def __init__(self, group: ShareGroup) -> None:
        self._group = group
        self._changed = Condition(group.cluster.threads)
        self._reads: dict[int, list[Entries]] = {}
        self._steps = 0
        self.sequences: Sequence[SequenceStep] = ()
        """The step's, as rank 0 has them."""
        self.entries: list[bytearray] = []
        """Entries of each sequence, the step's included; known once all ranks have met."""
        self.duration = 0.0

    def meet(self, number: int, reads: list[Entries]) -> None:
        """Wait until each rank has read its cells."""
        with self._changed:
            self._reads[number] = reads
            if len(self._reads) == self._group.size:
                self.entries = self._join(list(self._reads.values()))
                self._reads = {}
                self._steps += 1
                self._changed.notify_all()
                return
            step = self._steps
            while self._steps == step:
                self._changed.wait()

    def _join(self, by_rank: Sequence[list[Entries]]) -> list[bytearray]:
        entries = []
        for sequence, reads in zip(self.sequences, zip(*by_rank, strict=True), strict=True):
            try:
                known = bytearray(agreed(reads).tobytes())
            except CellsDiffer as error:
                self._group.cluster.report_violation(f"{self._group.machine.host}: {error}")
                known = bytearray(reads[0].tobytes())
            extend(known, sequence.token_ids)
            entries.append(known)
        return entries


class RankMemories(dict[int, KVMemory]):
    """The memories of a rank by number, and what its program makes of them."""

    own: ShareMemory | None = None


def make_share_memory(memories: RankMemories) -> ShareMemory:
    """Stand in for `ShareMemory` in the program of a rank: its test looks at what it keeps."""
    memories.own = ShareMemory(memories)
    return memories.own


class RankBackend:
    """Stand-in for a rank's `PartsBackend`."""

    def __init__(self, rank: RankProcess) -> None:
        self._rank = rank

    def follow(
        self, sequences: Sequence[SequenceStep], greedy: bytes = b"", taps: Sequence[int] | None = None
    ) -> bool:
        """Compute its share of a step, of whose end rank 0 waits for a word."""
        self._rank.group.compute(self._rank.number, self._rank.cells, sequences)
        return True


class RankProcess:
    """A rank other than 0: its host, its cells, and its blocks where it has them alone."""

    def __init__(self, group: ShareGroup, number: int, share: KVShare, host: Host, *, alone: bool) -> None:
        self.group, self.number, self.share, self.host, self.alone = group, number, share, host, alone
        self.cells = HeldCells(share, alone=alone)
        self.memories = RankMemories()
        self._backend = RankBackend(self)

    def start(self, ends: dict[str, Any], holder: int) -> None:
        """Start its program: the product's, where it has memories of its own."""
        threads = self.group.cluster.threads
        order: Any = SimpleNamespace(share_host="127.0.0.1", holder=holder)
        loaded: Any = SimpleNamespace(backend=self._backend)
        memories: Any = SimpleNamespace(
            mapped=self.memories,
            serve=threads.stay,
            pool=None,  # nothing is mapped between ranks
            device=CPU,
        )
        adapters: Any = None  # none are loaded
        if self.alone:
            threads.start(self.host, lambda: serve_holder(ends, order, loaded, memories, adapters))
        else:
            threads.start(self.host, lambda: self._follow(ends["plans"]))

    def _follow(self, plans: Any) -> None:
        try:
            while True:
                self._backend.follow(follow_plan(plans.recv(), self.memories))
                plans.send_bytes(b"")
        except (OSError, EOFError):
            self.group.cluster.leave_rank()


@dataclass(frozen=True)
class _Local:
    """A rank of this host, as rank 0 has it; see `RankGroup`."""

    plans: Any

    def send_plan(self, planned: StepPlan) -> None:
        self.plans.send(planned)


class _Memories:
    """The memories of a group, by number; see `SharedMemories`."""

    def __init__(self, group: ShareGroup) -> None:
        self._group = group
        self._numbers: weakref.WeakKeyDictionary[KVMemory, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()

    def number_of(self, memory: KVMemory) -> int:
        return self._numbers[memory]

    def allocate(self, layout: KVLayout, num_blocks: int) -> KVMemory:
        return self.allocate_pool(layout, num_blocks).memory

    def allocate_pool(self, layout: KVLayout, num_blocks: int) -> PoolMemory:
        """Return blocks that each rank has: as a memory common to all, or as its own share of each."""
        group, number = self._group, next(self._next)
        if group.held is None:
            memory = KVMemory(layout, num_blocks)
        else:
            begin = group.held.layers.start, group.held.heads.start
            memory = KVMemory(group.held.narrow(layout), num_blocks).as_share_of(layout, *begin)
        self._numbers[memory] = number
        for rank in group.ranks:
            rank.memories[number] = KVMemory(rank.share.narrow(layout), num_blocks) if rank.alone else memory
        if group.holders is not None:
            memory.spread = SpreadShares(memory, number, group.holders[0], group.elsewhere)
        return PoolMemory(memory, None)

    def room_for(self, *_: object) -> int:
        """Return no number of bytes: no GPU is here."""
        raise NotImplementedError


class ShareGroup:
    """Stand-in for `RankGroup`, some of whose ranks have memories of their own, or none."""

    def __init__(self, cluster: Cluster, machine: Machine, shape: GroupShape) -> None:
        self.cluster, self.machine = cluster, machine
        self.grid = Grid(shape.ranks, shape.stages)
        self.size = self.grid.size
        self.meeting = Meeting(self)
        self._steps = Queue(cluster.threads)
        shares = dealt_shares(self.grid)
        here, first = self.size - shape.remote, 1000 * machine.host.incarnation
        self.held = shares[0] if shape.rank_0_alone else None
        self.cells = HeldCells(shares[0], alone=shape.rank_0_alone)
        self.holders: Holders | None = None
        if shape.remote:
            self.holders = (tuple(shares[:here]), *((share,) for share in shares[here:]))
        self.ranks = [
            RankProcess(self, n, shares[n], Host(f"{machine.host.name}/{n}", first + n, 0.0), alone=n >= here)
            for n in range(1, self.size)
        ]
        self.pids = [pid_of(rank.host) for rank in self.ranks if not rank.alone]
        self.elsewhere: list[tuple[RemoteRank, KVShare]] = []
        self.pipes_to_other_machines: dict[Host, list[tuple[PipeEnd, PipeEnd]]] = {}
        """Connections of each rank of another machine, rank 0's end first."""
        self._others: list[Any] = [self._join(rank, here) for rank in self.ranks]
        self.memories = _Memories(self)
        machine.host.on_death.append(self._follow)
        cluster.threads.start(machine.host, self._run_steps)

    @property
    def devices(self) -> list[str]:
        """Return no GPU for each holder of blocks."""
        return [""] * len(self.holders or ())

    @property
    def hosts(self) -> list[Host]:
        """The other processes."""
        return [rank.host for rank in self.ranks]

    @property
    def hangs(self) -> bool:
        """True while a rank is stopped: a step of the group cannot end."""
        return any(host.stopped and not host.dead for host in self.hosts)

    @property
    def kept_shares(self) -> int:
        """Shares that ranks keep, of which rank 0 has not said what becomes."""
        shares = [rank.memories.own for rank in self.ranks if rank.memories.own is not None]
        return sum(len(own.arrivals._staged) for own in shares if own.arrivals is not None)

    def measure_memory(self, layout: KVLayout, num_blocks: int) -> None:
        """Do nothing: hosts here have no memory to measure."""

    async def map_pool(self, memory: KVMemory, welcome: Welcome, tokens: Sequence[bytes]) -> None:
        """Raise TransportError: such groups hand off by tcp."""
        raise TransportError("these ranks map no pool")

    # -- steps, on threads

    def run(self, engine: bool, func: Callable[[], Any], duration: float) -> Any:
        """Return a future of the result of `func`, on the engine's thread or on one of its own."""
        done = self.cluster.loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = func()
            except Exception as raised:
                error = raised
            self.cluster.loop.call_soon(settle, result, error)

        def step() -> None:
            self.meeting.duration = duration
            work()

        if engine:
            self._steps.put(step)
        else:
            self.cluster.threads.start(self.machine.host, work)
        return done

    def _run_steps(self) -> None:
        while True:
            self._steps.get()()

    def begin_step(self, plan: StepPlan) -> None:
        """See `RankGroup.begin_step`."""
        for rank in self._others:
            rank.send_plan(plan)

    def end_step(self) -> None:
        """See `RankGroup.end_step`."""
        for rank in self._others:
            rank.plans.recv_bytes()

    def compute(self, number: int, cells: HeldCells, sequences: Sequence[SequenceStep]) -> None:
        """Compute a rank's share of a step: its cells of the `sequences`, which are in its memory."""
        meeting, cluster = self.meeting, self.cluster
        cluster.threads.sleep(meeting.duration * cluster.chance() / 2)
        reads = []
        for sequence in sequences:
            try:
                reads.append(cells.read(sequence))
            except CellsDiffer as error:
                cluster.report_violation(f"{self.machine.host}, rank {number}: {error}")
                reads.append(np.zeros(sequence.start, dtype=np.uint64))
        self._wait_while_silent(number)
        meeting.meet(number, reads)
        cluster.threads.sleep(meeting.duration * cluster.chance() / 2)
        for at, sequence in enumerate(sequences):
            cluster.check_write(self.machine, meeting.sequences[at])
            cells.write(sequence, np.frombuffer(meeting.entries[at], dtype=np.uint64)[sequence.start :])

    def _wait_while_silent(self, number: int) -> None:
        """Wait while nothing comes from the machine of this rank, which the others wait for."""
        host, loop = self.machine.host if number == 0 else self.ranks[number - 1].host, self.cluster.loop
        while host.silent_until > loop.now:
            self.cluster.threads.sleep(host.silent_until - loop.now)

    # -- the end

    def fail(self, error: BaseException) -> Any:
        """End this process, and with it the group; see `RankGroup.fail`."""
        self.cluster.kill(self.machine.host, f"its group ends: {error!r}")
        self.cluster.threads.stay()

    def _join(self, rank: RankProcess, here: int) -> Any:
        """Connect a rank, start it, and return it as rank 0 has it."""
        cluster, host = self.cluster, self.machine.host
        pipes = {
            name: make_pipe(cluster.network, cluster.threads, host, rank.host, one_machine=not rank.alone)
            for name in (_ENDS if rank.alone else ("plans",))
        }
        rank.start({name: there for name, (_, there) in pipes.items()}, rank.number - here + 1)
        ends: dict[str, Any] = {name: ours for name, (ours, _) in pipes.items()}
        if not rank.alone:
            rank.host.on_death.append(partial(self._report, rank.host))
            return _Local(ends["plans"])
        self.pipes_to_other_machines[rank.host] = list(pipes.values())
        made = RemoteRank(Joined(rank.host.name, pid_of(rank.host), ends), self.fail)
        self.elsewhere.append((made, rank.share))
        return made

    def _report(self, host: Host) -> None:
        """End rank 0 when it sees that a rank of its host is dead."""
        loop, cluster = self.cluster.loop, self.cluster
        loop.on_host(self.machine.host, KERNEL_S, cluster.kill, self.machine.host, f"{host.name} died")

    def _follow(self) -> None:
        """Kill the ranks of this host with rank 0; those elsewhere see the end of their connections."""
        for rank in self.ranks:
            if not rank.alone:
                delay = LAST_BREATH_S * self.cluster.chance()
                self.cluster.outside(delay, self.cluster.kill, rank.host, "rank 0 is dead")


class GroupRunner(CellRunner):
    """The runner of rank 0: all ranks compute each step; see `GroupBackend`."""

    group: ShareGroup

    def step(self, sequences: Sequence[SequenceStep], abort: AbortWords | None = None) -> Any:
        """Compute a step, on a thread. No rank ends it before its end, as across hosts."""
        check_batch(sequences, VOCABULARY)
        group = self.group
        group.meeting.sequences = sequences
        try:
            group.begin_step(make_plan(sequences, group.memories.number_of))
            group.compute(0, group.cells, sequences)
            group.end_step()
        except (OSError, EOFError) as error:
            group.fail(error)
        entries = group.meeting.entries
        rows: list[int] = []
        for number, sequence in enumerate(sequences):
            if abort is not None and abort.is_aborted(number):
                rows += [0] * sequence.logit_rows
            else:
                rows += self.logits(sequence, entries[number])
        return rows


@dataclass(frozen=True)
class GroupModel(SimulatedModel):
    """The model of a group, whose memories all ranks have."""

    group: Any = None

    def kv_memory(self, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Return memory of which each rank has its share."""
        return self.group.memories.allocate(layout, num_blocks)  # type: ignore[no-any-return]
