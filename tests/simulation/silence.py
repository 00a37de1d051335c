"""Machines that fall silent: neither processes there nor their kernel can be reached, and no connection ends.

The kernels end connections between ranks of a group after `LOST_S`, as the product asks of them: then all its
processes must give it up. A shorter silence delays messages, and no more. Workers are missed by heartbeats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.worker_process.group.rendezvous import LOST_S
from tests.simulation.share_group import ShareGroup
from tests.simulation.thread_sockets import PipeEnd
from tests.simulation.virtual_loop import Host

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

KERNEL_LATE_S = 2.0
"""Most seconds by which a kernel ends a connection later: it asks the other one as often."""
GIVEN_UP_S = 3.0
"""Seconds after `LOST_S` within which a process that runs has given its group up."""


def fall_silent(cluster: Cluster, name: str, lasts_s: float) -> bool:
    """Silence the machine of a worker's rank 0, or of a rank that has another machine; False: it is none."""
    host, machine = cluster.process(name), cluster.alive(name.partition("/")[0])
    if host is None or machine is None or host.silent_until > cluster.loop.now:
        return False
    links = machine.ranks.pipes_to_other_machines if isinstance(machine.ranks, ShareGroup) else {}
    if host is not machine.host:
        if host not in links:
            return False
        links = {host: links[host]}
    host.silent_until = cluster.loop.now + lasts_s
    if links and lasts_s > LOST_S + KERNEL_LATE_S:
        _end_connections(cluster, machine.host, links, name)
    return True


def _end_connections(
    cluster: Cluster, rank_0: Host, links: dict[Host, list[tuple[PipeEnd, PipeEnd]]], silent: str
) -> None:
    """Let the kernels end connections between rank 0 and ranks of other machines, at both ends."""
    for rank, pipes in links.items():
        for ours, theirs in pipes:
            for process, end in ((rank_0, ours), (rank, theirs)):
                late = LOST_S + KERNEL_LATE_S * cluster.chance()
                cluster.loop.on_host(process, late, end.lose)
    for process in (rank_0, *links):
        cluster.outside(LOST_S + GIVEN_UP_S, _check_given_up, cluster, process, silent)


def _check_given_up(cluster: Cluster, process: Host, silent: str) -> None:
    """Report a process that still runs; one that is stopped has its time once it goes on."""
    if process.stopped and not process.dead:
        cluster.outside(GIVEN_UP_S, _check_given_up, cluster, process, silent)
    elif not process.dead:
        cluster.report_violation(f"{process} has not given up its group, though {silent} fell silent")
