"""Machines that fall silent: neither a rank's process nor its kernel can be reached, and no connection ends.

The kernels at both ends end their connections after `LOST_S`, as the product asks of them: by then rank 0 and
the rank must have given the group up. A shorter silence delays messages, and no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.worker_process.group.rendezvous import LOST_S
from tests.simulation.share_group import ShareGroup
from tests.simulation.virtual_loop import Host

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

KERNEL_LATE_S = 2.0
"""Most seconds by which a kernel ends a connection later: it asks the other one as often."""
GIVEN_UP_S = 3.0
"""Seconds after `LOST_S` within which a process that runs has given its group up."""


def fall_silent(cluster: Cluster, rank: str, lasts_s: float) -> bool:
    """Silence the machine of a rank; False where it is no rank of another machine than rank 0's."""
    host, machine = cluster.process(rank), cluster.alive(rank.partition("/")[0])
    if host is None or machine is None or not isinstance(machine.ranks, ShareGroup):
        return False
    pipes = machine.ranks.pipes_to_other_machines.get(host)
    if pipes is None or host.silent_until > cluster.loop.now:
        return False
    host.silent_until = cluster.loop.now + lasts_s
    if lasts_s > LOST_S + KERNEL_LATE_S:
        for ours, theirs in pipes:
            for process, end in ((machine.host, ours), (host, theirs)):
                late = LOST_S + KERNEL_LATE_S * cluster.chance()
                cluster.loop.on_host(process, late, end.lose)
        for process in (machine.host, host):
            cluster.outside(LOST_S + GIVEN_UP_S, _check_given_up, cluster, process, rank)
    return True


def _check_given_up(cluster: Cluster, process: Host, rank: str) -> None:
    """Report a process that still runs; one that is stopped has its time once it goes on."""
    if process.stopped and not process.dead:
        cluster.outside(GIVEN_UP_S, _check_given_up, cluster, process, rank)
    elif not process.dead:
        cluster.report_violation(f"{process} has not given up its group, though {rank} fell silent")
