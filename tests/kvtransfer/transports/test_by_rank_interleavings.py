"""Shares of many grants in random orders: placed into open grants alone, by a live session, and whole.

The ranks are stand-ins that record orders. A control, a receiver that takes damaged shares, must be caught.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_routes import kv_routes
from diptych.engine.parallel.kv_shares import KVShare
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports import tcp, tcp_receiver_by_rank
from kvtransfer.transports.base import ReceiverHooks
from kvtransfer.transports.rank_data import (
    HEADER,
    ArrivedShare,
    SessionBroke,
    joined_digest,
    pieces_bytes,
    share_digest,
    share_hash,
)
from kvtransfer.transports.tcp_receiver_by_rank import ByRankReceiver

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=2, block_size=2, dtype=torch.float32)
SENDERS = ((KVShare(range(2), range(2)),), (KVShare(range(2), range(1, 3)),))
RECEIVERS = tuple((KVShare(range(2), range(head, head + 1)),) for head in range(3))
ROUTES = kv_routes(SENDERS, RECEIVERS)
WRITER, SLOTS, INDICES = WriterId("w", 1), 3, 2


class Violation(AssertionError):
    """A share that reached a block and must not have, or a block that counts as arrived and has not."""


class World:
    """A decode worker with three holders, and all that may happen to it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.grants: dict[int, GrantRef] = {}
        self.generation = 0
        self.placed: dict[tuple[GrantRef, int], dict[tuple[int, int], bytes]] = {}
        self.arrived: Counter[tuple[GrantRef, int]] = Counter()
        self.dead = 0
        self.told: Counter[int] = Counter()
        """Answers for each share that a rank keeps."""
        self.share: tuple[ArrivedShare, int, bool, int] | None = None
        """Share that comes now: with its holder, whether its digest is right, and its session."""
        memory = KVMemory(LAYOUT, SLOTS * INDICES)
        ranks = SimpleNamespace(
            holders=RECEIVERS,
            place_share=self.place,
            drop_share=lambda holder, staged: self.told.update([staged]),
            end_session=lambda holder, session: None,
        )
        hooks = ReceiverHooks(self.count_dead, self.resolve, self.destinations, self.arrive, lambda *_: None)
        whole = tcp.tcp_receiver("127.0.0.1", memory, hooks)
        self.receiver = ByRankReceiver(whole, "127.0.0.1", memory, hooks)
        self.receiver._ranks, self.receiver._holders = ranks, RECEIVERS  # type: ignore[assignment]
        self.receiver._endpoints = ["127.0.0.1:1"] * 2
        self.receiver._listener = SimpleNamespace(  # type: ignore[assignment]
            admit=lambda end: bytes(32), expel=lambda end: None, endpoint="127.0.0.1:2"
        )
        self.session, self.readers = 0, {}
        self.admit()

    def admit(self) -> None:
        self.receiver.admit_holders(WRITER, SENDERS)
        self.session += 1
        acks = SimpleNamespace(acknowledge=lambda count: None)
        open_reader: Any = self.receiver._open_reader
        self.readers[self.session] = open_reader(WriterId("0", self.session), acks)
        self.readers[self.session].first_buffer()

    # -- hooks

    def count_dead(self, writer: WriterId) -> None:
        self.dead += 1

    def resolve(self, writer: WriterId, slot: int, generation: int) -> GrantRef | None:
        found = self.grants.get(slot)
        return found if found is not None and found.generation == generation else None

    def destinations(self, writer: WriterId, ref: GrantRef, places: range) -> list[int] | None:
        if self.grants.get(ref.slot) != ref or places.stop > INDICES:
            return None
        return [ref.slot * INDICES + index for index in places]

    def arrive(self, writer: WriterId, ref: GrantRef, first: int, digests: list[bytes]) -> None:
        found = self.placed[ref, first]
        if set(found) != set(ROUTES) or digests != [joined_digest([found[at] for at in ROUTES])]:
            raise Violation(f"block {first} of {ref} has not arrived")
        self.arrived[ref, first] += 1
        found.clear()

    def place(self, holder: int, staged: int, block: int, pieces: Any) -> None:
        self.told.update([staged])
        self.check(block)

    def check(self, block: int) -> None:
        assert self.share is not None
        share, holder, right, session = self.share
        ref = self.grants.get(share.slot)
        live = session == self.session and session in self.receiver._sessions
        if not (live and right and ref is not None and ref.generation == share.generation):
            raise Violation(f"{share} was placed")
        if block != share.slot * INDICES + share.index:
            raise Violation(f"{share} was placed in block {block}")
        self.placed.setdefault((ref, share.index), {})[share.source, holder] = share.digest

    # -- events

    def step(self, number: int) -> None:
        events = [self.grant, self.revoke, self.fence, self.breaks, lambda: self.sends(number)]
        self.rng.choices(events, [3, 2, 0.3, 0.3, 60])[0]()

    def grant(self) -> None:
        slot = self.rng.randrange(SLOTS)
        self.generation += 1
        self.grants[slot] = GrantRef((f"r{self.generation}", 1), slot, self.generation)

    def revoke(self) -> None:
        self.grants.pop(self.rng.randrange(SLOTS), None)

    def fence(self) -> None:
        dead = self.dead
        self.receiver.fence(WRITER)
        assert self.dead == dead + 1
        self.placed.clear()
        self.admit()

    def breaks(self) -> None:
        session = self.rng.randint(1, self.session)
        dead, live = self.dead, session == self.session
        self.receiver._on_event(1, SessionBroke(session))
        assert self.dead == dead + live
        if live:
            self.placed.clear()
            self.admit()

    def sends(self, number: int) -> None:
        """Let a share come: of this or an earlier session, of this or an earlier grant, whole or not."""
        rng = self.rng
        source, holder = rng.choice(list(ROUTES))
        slot, index = rng.randrange(SLOTS), rng.randrange(INDICES)
        known = self.grants.get(slot)
        ref = known if known is not None else GrantRef(("gone", 1), slot, max(self.generation - 1, 0))
        if rng.random() < 0.1:
            ref = ref._replace(generation=max(ref.generation - rng.randint(1, 3), 0))
        session = self.session if rng.random() < 0.9 else rng.randint(1, self.session)
        payload = rng.randbytes(pieces_bytes(LAYOUT, ROUTES[source, holder]))
        digest = share_digest(ref, index, source, holder, share_hash(payload))
        right = rng.random() < 0.9
        sent = payload if right else bytes([payload[0] ^ 1]) + payload[1:]
        share = ArrivedShare(
            session, source, slot, ref.generation, index, digest, share_hash(sent), len(sent), number
        )
        self.share = (share, holder, right, session)
        if holder:
            self.receiver._on_event(holder, share)
            assert self.told[number] == 1, "a rank keeps what is not answered"
            return
        before = self.receiver._memory.data.clone()
        self.local(session, HEADER.pack(slot, ref.generation, index, len(sent), digest), sent)
        changed = (self.receiver._memory.data != before).flatten(1).any(1).nonzero().flatten().tolist()
        assert len(changed) <= 1

    def local(self, session: int, header: bytes, payload: bytes) -> None:
        """Let a share come to the worker's own process, whose socket a session's end has closed."""
        if session != self.session:
            return
        reader = self.readers[session]
        reader.first_buffer()[:] = header
        reader.buffer_filled()[:] = payload
        reader.buffer_filled()


def run_all(seeds: range, monkeypatch: pytest.MonkeyPatch) -> list[World]:
    return [run(seed, monkeypatch) for seed in seeds]


def run(seed: int, monkeypatch: pytest.MonkeyPatch, steps: int = 600) -> World:
    world = World(seed)

    def write(memory: KVMemory, block: int, pieces: Any, payload: memoryview) -> None:
        world.check(block)

    monkeypatch.setattr(tcp_receiver_by_rank, "write_pieces", write)
    for number in range(steps):
        world.step(number)
    return world


def test_random_orders_place_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = run_all(range(40), monkeypatch)
    assert all(world.session > 1 for world in worlds)
    assert sum(sum(world.arrived.values()) for world in worlds) > 100


@pytest.mark.parametrize("bug", ["damaged shares are taken", "a session outlives its fence"])
def test_a_receiver_with_a_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    if bug.startswith("damaged"):
        monkeypatch.setattr(tcp_receiver_by_rank, "share_digest", lambda ref, index, i, j, hashed: ANY)
    else:
        monkeypatch.setattr(ByRankReceiver, "_drop", lambda self, session: None)
    with pytest.raises(AssertionError):
        run_all(range(40), monkeypatch)


class _Any(bytes):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


ANY = _Any()
