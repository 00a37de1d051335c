"""Groups whose ranks have memories of their own: seeds of the simulation, and bugs planted in the handoff."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from diptych.engine.parallel.kv_shares import KVShare
from diptych.worker_process.group import holder_program
from diptych.worker_process.group.remote_rank import RemoteRank
from diptych.worker_process.group.rendezvous import LOST_S
from diptych.worker_process.group.share_link import ShareLink
from diptych.worker_process.group.spread_blocks import SpreadShares
from kvtransfer.drivers.push_queue import PushQueue
from kvtransfer.protocol.receiver import Receiver
from kvtransfer.transports import tcp_receiver_by_rank
from kvtransfer.transports.rank_data import SessionBroke, share_hash
from kvtransfer.transports.tcp_receiver_by_rank import ByRankReceiver
from tests.simulation.campaign import Summary
from tests.simulation.run import simulate
from tests.simulation.scenario import make_scenario
from tests.simulation.shrink import explain

Patch = pytest.MonkeyPatch
_SENDERS = ("kvtransfer.transports.tcp_by_rank", "diptych.worker_process.group.share_pushes")
_BOTH = (*_SENDERS, "kvtransfer.transports.tcp_receiver_by_rank")


@pytest.mark.parametrize("seeds", [16, pytest.param(500, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_seeds_of_shares_by_rank_violate_no_invariant(seeds: int) -> None:
    summary = Summary()
    for seed in range(seeds):
        scenario = make_scenario(seed, "shares")
        outcome = simulate(scenario)
        if outcome.violation:
            pytest.fail(explain(seed, scenario), pytrace=False)
        summary.add(seed, outcome)
    assert summary.ends["ok"] > 2 * seeds
    assert summary.faults.total() > 5 * seeds
    assert summary.shares > 20 * seeds, "shares did not go by rank"


def shares_are_not_verified(patch: Patch) -> None:
    """The digest of a share is not compared."""
    for module in _BOTH:
        patch.setattr(f"{module}.share_digest", lambda *_: bytes(16))


def shares_of_an_old_grant_are_placed(patch: Patch) -> None:
    """A late share is taken for one of the grant that has its slot now."""

    def resolve(self: Receiver, writer: Any, slot: int, generation: int) -> Any:
        open_ones = (grant.ref for who, grant in self.open_grants() if who == writer)
        return next((ref for ref in open_ones if ref.slot == slot), None)

    def digest(ref: Any, index: int, source: int, target: int, hashed: bytes) -> bytes:
        return share_hash(bytes([index, source, target]) + hashed)

    patch.setattr(Receiver, "resolve", resolve)
    for module in _BOTH:
        patch.setattr(f"{module}.share_digest", digest)


def heads_are_off_by_one(patch: Patch) -> None:
    """A share is written a head before its own, where there is one."""
    real = tcp_receiver_by_rank.within

    def within(share: KVShare, holder: KVShare) -> KVShare:
        found = real(share, holder)
        back = found.heads.start > 0
        return KVShare(found.layers, range(found.heads.start - back, found.heads.stop - back))

    patch.setattr(tcp_receiver_by_rank, "within", within)


def promises_come_before_ranks_are_quiet(patch: Patch) -> None:
    """Stopped is sent, and the blocks are given up, while ranks still send shares of them."""
    patch.setattr(PushQueue, "when_idle", lambda self, ref, done: done())


def pulled_blocks_reach_rank_0_alone(patch: Patch) -> None:
    """A block that came whole is written to the memory of rank 0."""
    patch.setattr(RemoteRank, "write_share", lambda self, number, block, payload: None)


def lost_pair_leaves_the_session(patch: Patch) -> None:
    """The session of a writer goes on where a rank's connection ended."""
    real = ByRankReceiver._on_event

    def on_event(self: ByRankReceiver, holder: int, event: Any) -> None:
        if not isinstance(event, SessionBroke):
            real(self, holder, event)

    patch.setattr(ByRankReceiver, "_on_event", on_event)


def stale_shares_are_kept(patch: Patch) -> None:
    """A rank is not told that a share is stale."""
    patch.setattr(SpreadShares, "drop_share", lambda self, holder, staged: None)


def rank_0_alone_copies(patch: Patch) -> None:
    """Copy-on-write copies the share of rank 0."""
    patch.setattr(RemoteRank, "copy_block", lambda self, number, src, dst: None)


def idle_group_outlives_its_connections(patch: Patch) -> None:
    """Rank 0 notices the end of a rank's connections only when it needs them."""

    def read(self: ShareLink) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._take(self._connection.recv())

    patch.setattr(ShareLink, "_read", read)


def rank_outlives_its_connections(patch: Patch) -> None:
    """A rank stays when its connections end."""
    patch.setattr(holder_program, "leave_group", lambda: None)


PLANTED: list[Any] = [
    (shares_are_not_verified, 40),
    pytest.param(shares_of_an_old_grant_are_placed, 60, marks=pytest.mark.full),
    (heads_are_off_by_one, 10),
    (promises_come_before_ranks_are_quiet, 60),
    pytest.param(pulled_blocks_reach_rank_0_alone, 60, marks=pytest.mark.full),
    pytest.param(lost_pair_leaves_the_session, 100, marks=pytest.mark.full),
    (stale_shares_are_kept, 20),
    (rank_0_alone_copies, 40),
]


@pytest.mark.parametrize(("plant", "within"), PLANTED, ids=lambda value: getattr(value, "__name__", None))
def test_planted_bug_in_shares_is_found(
    plant: Callable[[Patch], None], within: int, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    found = (seed for seed in range(within) if simulate(make_scenario(seed, "shares")).violation)
    assert next(found, None) is not None, f"{within} seeds do not show it"


@pytest.mark.parametrize("plant", [idle_group_outlives_its_connections, rank_outlives_its_connections])
def test_planted_bug_where_machines_fall_silent_is_found(
    plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    scenarios = (make_scenario(seed, "shares") for seed in range(60))
    silent = (one for one in scenarios if any(f.kind == "silence" and f.lasts_s > LOST_S for f in one.faults))
    violations = (simulate(scenario).violation for scenario in silent)
    assert any("has not given up its group" in violation for violation in violations)
