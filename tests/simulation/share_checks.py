"""Checks of shares of blocks that go by rank: what is read to be sent, and what is placed where."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.rank_data import ArrivedShare
from kvtransfer.transports.tcp_receiver_by_rank import ByRankReceiver
from tests.simulation.virtual_loop import current_host

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster, Machine


class ShareChecks:
    """What the ranks of all workers sent, and the checks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.placed = 0
        self._grants: dict[bytes, tuple[GrantRef, int]] = {}
        """Grant and index of each share that was sent, by its digest."""

    def watched_digest(self, digest: Callable[..., bytes]) -> Callable[..., bytes]:
        """Return a sender's `share_digest`, which records what is sent."""

        def record(ref: GrantRef, index: int, *rest: Any) -> bytes:
            made = digest(ref, index, *rest)
            self._grants[made] = ref, index
            return made

        return record

    def watched_read(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a sender's `read_pieces`, with a check that its worker holds the block."""

        def checked(memory: KVMemory, block: int, *rest: Any) -> Any:
            self._check_held(block)
            return read(memory, block, *rest)

        return checked

    def watched_receiver(self, *args: Any) -> ByRankReceiver:
        """Return a `ByRankReceiver` whose placements are checked."""
        receiver = WatchedReceiver(*args)
        receiver.checks = self
        return receiver

    def check_placed(self, machine: Machine, session: Any, share: ArrivedShare, ref: GrantRef) -> None:
        """Check that a share goes where it was sent, and that this writer may write there."""
        self.placed += 1
        where = f"{machine.host}: a share of {ref}, block {share.index},"
        if self._grants.get(share.digest) != (ref, share.index):
            self._cluster.report_violation(f"{where} was sent for {self._grants.get(share.digest)}")
        granted = (
            who == session.writer and grant.ref == ref and share.index in grant.writable
            for who, grant in machine.receiver.open_grants()
        )
        if not any(granted):
            self._cluster.report_violation(f"{where} is placed, and is not granted to its sender")

    def lame_sessions(self, machine: Machine) -> int:
        """Return the number of sessions of a decode worker, whose ranks all run, without some connection."""
        cluster, groups = self._cluster, self._cluster.scenario.groups
        ends = {connection.ends for connection in cluster.sockets.open_connections()}
        here, found = groups["decode"].holders(machine.host.name), 0
        for receiver in machine.program._handoff._handshake.transports:
            for session in getattr(receiver, "_sessions", {}).values():
                writer = next(h.name for h in cluster.hosts if h.incarnation == session.writer.incarnation)
                there = groups["prefill"].holders(writer)
                pairs = {(there[source], here[target]) for source, target in session.routes}
                found += session.control is not None and not pairs <= ends
        return found

    def _check_held(self, block: int) -> None:
        host = current_host.get()
        machine = None if host is None else self._cluster.machines.get(host.name.partition("/")[0])
        if machine is None or machine.host.dead or not machine.scratch:
            return  # its rank 0 is dead: whatever it sends is dropped
        hosts = [] if machine.ranks is None else machine.ranks.hosts
        if host in (machine.host, *hosts) and not machine.scratch[-1].references(block):
            self._cluster.report_violation(f"{host} sends its share of block {block}, which was given up")


class WatchedReceiver(ByRankReceiver):
    """The decode worker's end, with a check of each share that it has written."""

    checks: ShareChecks

    def _placed(self, session: Any, holder: int, share: ArrivedShare, ref: GrantRef) -> None:
        self.checks.check_placed(self.checks._cluster.here(), session, share, ref)
        super()._placed(session, holder, share, ref)
