"""The other processes of a simulated group: hosts without a loop that write their lanes of every step.

They die with rank 0, a moment later, and rank 0 ends when it sees one of them dead. A step is over when every
rank has written. Between rank 0's death and theirs they may still write what its last step asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from kvtransfer.transports.base import Welcome
from kvtransfer.transports.pool_memory import PoolMemory
from tests.simulation.virtual_loop import Host

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster, Machine

KERNEL_S = 0.003
"""Seconds from a process' end to the kernel's report of it."""
LAST_BREATH_S = 0.02
"""Most seconds by which a rank outlives rank 0: the kernel's signal waits for the rank's next moment."""


def pid_of(host: Host) -> int:
    """Return the process id that a host has in the eyes of the others."""
    return host.incarnation


class SimulatedGroup:
    """Stand-in for `RankGroup`: the ranks 1 and up of one worker."""

    grid = SimpleNamespace(stages=1)
    holders = None
    devices = ()

    def __init__(self, cluster: Cluster, machine: Machine, count: int) -> None:
        self._cluster, self._machine = cluster, machine
        first = 1000 * machine.host.incarnation
        self.hosts = [Host(f"{machine.host.name}/{n}", first + n, 0.0) for n in range(1, count)]
        self.size = count
        self.memories = SimpleNamespace(
            allocate_pool=lambda layout, blocks: PoolMemory(KVMemory(layout, blocks), None),
            room_for=lambda *_: 0,
        )
        for host in self.hosts:
            host.on_death.append(lambda host=host: self._report(host))
        machine.host.on_death.append(self._follow)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids, in the order of the ranks."""
        return [pid_of(host) for host in self.hosts]

    @property
    def hangs(self) -> bool:
        """True while a rank is stopped: a step of the group cannot end."""
        return any(host.stopped and not host.dead for host in self.hosts)

    def measure_memory(self, layout: KVLayout, num_blocks: int) -> None:
        """Do nothing: hosts here have no memory to measure."""

    async def map_pool(self, memory: KVMemory, welcome: Welcome, tokens: Sequence[bytes]) -> None:
        """See `WriterRanks.map_pool`."""
        await asyncio.sleep(0.001)
        for host, token in zip(self.hosts, tokens, strict=True):
            self._cluster.shared_pools.register(welcome, token, host)

    def write(
        self, writes: Sequence[Callable[[], None]], duration: float, finish: Callable[[], None]
    ) -> None:
        """Let every rank, rank 0 first, write at some time within `duration`; then call `finish`."""
        left = len(writes)

        def wrote(act: Callable[[], None]) -> None:
            nonlocal left
            act()
            left -= 1
            if not left and not self._machine.host.dead:
                self._on(self._machine.host, 0.0, finish)

        for host, act in zip((self._machine.host, *self.hosts), writes, strict=True):
            self._on(host, duration * self._cluster.chance(), wrote, act)

    def _report(self, host: Host) -> None:
        """End rank 0 when it sees that `host` is dead, on its loop: not while it is stopped."""
        self._on(self._machine.host, KERNEL_S, self._cluster.kill, self._machine.host, f"{host.name} died")

    def _follow(self) -> None:
        """Kill the ranks of a dead rank 0, stopped ones as well, as the kernel does."""
        for host in self.hosts:
            delay = LAST_BREATH_S * self._cluster.chance()
            self._cluster.outside(delay, self._cluster.kill, host, "rank 0 is dead")

    def _on(self, host: Host, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        self._cluster.loop.on_host(host, delay, callback, *args)
