"""Receiver, senders and block pool against each other, under all delays, losses and deaths.

Messages of one stream stay in order; streams, data sockets and deaths interleave at will. After every step
each block is in one state, a block that a living in-place writer may write has no other owner, and no attempt
has two outcomes. A writer in place may come back to copy, while steps that it began in place still write.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.kv.window_prefix import WindowPrefix
from diptych.engine.kv.window_table import PromptWindow
from kvtransfer.protocol.messages import (
    Fail,
    FenceWriter,
    GrantDenied,
    GrantReceived,
    GrantRef,
    GrantRevoked,
    Handoff,
    Key,
    LinkLost,
    PendingTransfer,
    SendAbort,
    SendAsk,
    SendCommit,
    SendDenied,
    SendGrant,
    SendPushed,
    SendStopped,
    SendWithdrawal,
    WriterId,
)
from kvtransfer.protocol.receiver import Receiver
from kvtransfer.protocol.sender import Sender
from kvtransfer.protocol.transfer_table import ReceiverPhase

BLOCK_SIZE = 2
POOL = 10
CHUNK = 3
MAPPED, SOCKET = "mapped", "socket"
PREFIXES = [[bytes([family, depth]) for depth in range(1, 6)] for family in range(2)]


@dataclass
class Process:
    """Prefill worker: its state machine, and the messages in flight to and from it."""

    id: WriterId
    in_place: bool
    """True if it fills in place what it is granted by its present link, or by the next one without one."""
    reads: bool = False
    """True if it may read the cached prefix of these grants where it lies."""
    sender: Sender = field(default_factory=Sender)
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    data: deque[tuple[GrantRef, int]] = field(default_factory=deque)
    grants: dict[Key, GrantReceived] = field(default_factory=dict)
    held: dict[GrantRef, GrantReceived] = field(default_factory=dict)
    mapped: dict[GrantRef, bool] = field(default_factory=dict)
    """Whether it reads the prefix of each grant that it began to fill in place."""
    pushed: dict[GrantRef, int] = field(default_factory=dict)
    linked_there: bool = False
    """True while the decode side knows of a link."""

    @property
    def transport(self) -> str:
        return MAPPED if self.in_place else SOCKET


class HandoffMachine(RuleBasedStateMachine):
    total = POOL
    groups: WindowGroups | None = None

    @initialize()
    def build(self) -> None:
        self.pool = BlockPool(self.total)
        self.running = 0
        self.receiver = Receiver(self.pool, BLOCK_SIZE, lambda: self.running, groups=self.groups)
        self.processes = [
            Process(WriterId("a", 1), True),
            Process(WriterId("b", 1), False),
            Process(WriterId("c", 1), True, reads=True),
        ]
        self.attempts: dict[Key, PendingTransfer] = {}
        self.unasked: list[Key] = []
        self.past: list[Any] = []
        self.outcome: dict[Key, str] = {}
        self.owned: dict[Key, Handoff] = {}
        self.now = 0.0
        for process in self.processes:
            self.link(process)

    # -- plumbing

    def perform(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case SendGrant() | SendDenied() | SendAbort():
                    for process in self.processes:
                        if process.id == action.writer and process.linked_there:
                            process.down.append(action)
                case Handoff():
                    self.conclude(action.ref.key, "ready")
                    self.owned[action.ref.key] = action
                case Fail():
                    self.conclude(action.key, "failed")
                case FenceWriter():
                    for process in self.processes:
                        if process.id == action.writer:
                            self.kill(process)

    def conclude(self, key: Key, how: str) -> None:
        assert key not in self.outcome, f"{key} is {how} after it was {self.outcome[key]}"
        self.outcome[key] = how

    def send(self, process: Process, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case GrantReceived():
                    process.grants[action.ref.key] = action
                case LinkLost() | GrantDenied() | GrantRevoked():
                    pass  # the owner stops in its own time: rule `stop`
                case _:
                    if process.sender.linked and process.linked_there:
                        process.up.append(action)

    def link(self, process: Process) -> None:
        process.linked_there = True
        process.sender.link_up()
        self.perform(
            self.receiver.link_up(
                process.id,
                in_place=process.in_place,
                transport=process.transport,
                reads_prefix=process.reads,
                chunk=CHUNK,
            )
        )

    def kill(self, process: Process) -> None:
        """Kill a process with proof; its successor is another writer."""
        self.processes.remove(process)
        for transport in (MAPPED, SOCKET):
            self.perform(self.receiver.writer_dead(process.id, transport))
        heir_id = process.id._replace(incarnation=process.id.incarnation + 1)
        heir = Process(heir_id, process.id.worker_id != "b", process.id.worker_id == "c")
        self.processes.append(heir)
        self.link(heir)

    def deliver_up(self, process: Process) -> None:
        message = process.up.popleft()
        self.past.append(message)
        self.receive(process.id, message)

    def receive(self, writer: WriterId, message: Any) -> None:
        receiver = self.receiver
        match message:
            case SendAsk(key):
                self.perform(receiver.ask(writer, key))
            case SendWithdrawal(key):
                self.perform(receiver.withdraw(writer, key))
            case SendPushed(ref, first, count, digests):
                self.perform(receiver.pushed(writer, ref, first, count, digests))
            case SendCommit(ref, num_tokens, first_tokens, note):
                self.perform(receiver.commit(writer, ref, num_tokens, first_tokens, note))
            case SendStopped(ref, reason, message):
                self.perform(receiver.stopped(writer, ref, reason, message))

    def deliver_down(self, process: Process) -> None:
        match process.down.popleft():
            case SendGrant(_, ref, block_ids, cached_tokens):
                self.send(process, process.sender.granted(ref, block_ids, cached_tokens))
            case SendDenied(_, key, reason, message):
                self.send(process, process.sender.denied(key, reason, message))
            case SendAbort(_, ref):
                self.send(process, process.sender.abort(ref))

    def deliver_data(self, process: Process) -> None:
        ref, index = process.data.popleft()
        if self.receiver.destinations(process.id, ref, range(index, index + 1)) is not None:
            self.perform(self.receiver.arrived(process.id, ref, index, [digest(ref, index)]))

    def pick(self, data: Any, items: list[Any]) -> Any:
        return data.choice(items) if isinstance(data, random.Random) else data.draw(st.sampled_from(items))

    def push_upto(self, process: Process, ref: GrantRef, upto: int) -> None:
        first = process.pushed[ref]
        if upto <= first:
            return
        if ref in process.mapped:
            self.send(process, process.sender.push(ref, first, upto - first))
        elif process.sender.is_writing(ref):
            digests = [digest(ref, index) for index in range(first, upto)]
            process.data.extend((ref, index) for index in range(first, upto))
            self.send(process, process.sender.push(ref, first, upto - first, digests))
        process.pushed[ref] = upto

    # -- events of the gateway and the decode worker

    @rule(
        num_tokens=st.integers(1, 24),
        family=st.integers(0, 1),
        cached=st.booleans(),
        reserve=st.sampled_from([0, 0, 1, 2]),
        ask_first=st.booleans(),
    )
    def attach(self, num_tokens: int, family: int, cached: bool, reserve: int, ask_first: bool) -> None:
        """Attach an attempt; `reserve` is in blocks beyond those of its tokens."""
        key = (f"r{len(self.attempts)}", 1)
        keys = PREFIXES[family][: num_tokens // BLOCK_SIZE] if cached else []
        expected = PendingTransfer(
            key,
            num_tokens,
            keys,
            -(-num_tokens // BLOCK_SIZE) + reserve if reserve else None,
            reserve_windowed=reserve,
        )
        self.attempts[key] = expected
        if ask_first:
            process = self.processes[family]
            if process.sender.linked:
                self.send(process, process.sender.ask(key))
                while process.up:
                    self.deliver_up(process)
        else:
            self.unasked.append(key)
        self.perform(self.receiver.expect(expected))

    @precondition(lambda self: len(self.outcome) < len(self.attempts))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = self.pick(data, [key for key in self.attempts if key not in self.outcome])
        self.perform(self.receiver.cancel(key))
        self.outcome.setdefault(key, "cancelled")

    @precondition(lambda self: self.receiver.open_grants())
    @rule()
    def abort_newest(self) -> None:
        key, actions = self.receiver.abort_newest_grant()
        if key is not None:
            self.conclude(key, "preempted")
        self.perform(actions)

    @rule(running=st.integers(0, 3))
    def run_sequences(self, running: int) -> None:
        self.running = running
        self.perform(self.receiver.blocks_freed())

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = self.pick(data, list(self.owned))
        self.release(self.owned.pop(key))

    def release(self, done: Handoff) -> None:
        keys = self.attempts[done.ref.key].keys
        parent = b""
        for block, block_key in zip(done.block_ids, keys, strict=False):
            self.pool.insert(block, block_key, parent)
            parent = block_key
        if self.groups is not None:
            self.publish_window(done, self.groups)
        self.pool.release(done.held)
        self.perform(self.receiver.blocks_freed())

    def publish_window(self, done: Handoff, groups: WindowGroups) -> None:
        """Enter the windowed blocks behind a prompt into the prefix cache."""
        keys, cached = self.attempts[done.ref.key].keys, done.cached_tokens // BLOCK_SIZE
        window = PromptWindow(groups.tables, done.window_pins, done.window_blocks, cached)
        prefix = WindowPrefix(self.pool, groups, BLOCK_SIZE)
        for place in range(groups.first_kept(done.num_tokens - 1, BLOCK_SIZE), len(keys)):
            prefix.insert(window.blocks(place), keys[place])
        prefix.insert_shared(window, done.block_ids[: -(-done.num_tokens // BLOCK_SIZE)], keys)

    @rule(seconds=st.sampled_from([0.3, 2.0, 20.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.receiver.tick(self.now))

    # -- events of the prefill workers

    def writing(self) -> list[tuple[Process, GrantRef]]:
        return [(process, ref) for process in self.processes for ref in process.held]

    @precondition(lambda self: self.unasked)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        process = self.pick(data, self.processes)
        key = self.pick(data, self.unasked)
        if process.sender.linked:
            self.unasked.remove(key)
            self.send(process, process.sender.ask(key))

    @precondition(lambda self: any(process.grants for process in self.processes))
    @rule()
    def start_writing(self) -> None:
        for process in self.processes:
            for key, grant in process.grants.items():
                if process.sender.start_writing(key):
                    process.held[grant.ref] = grant
                    if process.in_place:
                        process.mapped[grant.ref] = process.reads
                    process.pushed[grant.ref] = grant.cached_tokens // BLOCK_SIZE
            process.grants.clear()

    @precondition(lambda self: self.writing())
    @rule(data=st.data(), blocks=st.integers(1, 12))
    def push(self, data: st.DataObject, blocks: int) -> None:
        process, ref = self.pick(data, self.writing())
        self.push_upto(process, ref, min(blocks, len(process.held[ref].block_ids)))

    @precondition(lambda self: self.writing())
    @rule(data=st.data(), wrong=st.sampled_from([0, 0, 0, 0, 0, 0, 1]))
    def commit(self, data: st.DataObject, wrong: int) -> None:
        process, ref = self.pick(data, self.writing())
        grant = process.held.pop(ref)
        if ref not in process.mapped:
            self.push_upto(process, ref, len(grant.block_ids))
        tokens = self.attempts[ref.key].num_tokens + wrong
        self.send(process, process.sender.commit(ref, tokens, (7,))[1])

    @precondition(lambda self: self.writing())
    @rule(data=st.data(), gives_up=st.booleans())
    def stop(self, data: st.DataObject, gives_up: bool) -> None:
        process, ref = self.pick(data, self.writing())
        del process.held[ref]
        self.send(process, process.sender.stop(ref, 1 if gives_up else None))

    @precondition(lambda self: any(process.sender._attempts for process in self.processes))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        process = self.pick(data, [process for process in self.processes if process.sender._attempts])
        key = self.pick(data, list(process.sender._attempts))
        process.grants.pop(key, None)
        self.send(process, process.sender.withdraw(key))

    # -- events of the network and the kernel

    def in_flight(self) -> list[tuple[Process, str]]:
        ways = ("up", "down", "data")
        return [(process, way) for process in self.processes for way in ways if getattr(process, way)]

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data(), messages=st.sampled_from([1, 2, 100]))
    def deliver(self, data: st.DataObject, messages: int) -> None:
        process, way = self.pick(data, self.in_flight())
        step = {"up": self.deliver_up, "down": self.deliver_down, "data": self.deliver_data}[way]
        while messages and getattr(process, way):
            step(process)
            messages -= 1

    @precondition(lambda self: any(len(process.data) > 1 for process in self.processes))
    @rule(data=st.data(), twice=st.booleans())
    def data_overtakes(self, data: st.DataObject, twice: bool) -> None:
        """Deliver a block out of order, perhaps twice: blocks name their index, so that neither matters."""
        process = self.pick(data, [process for process in self.processes if len(process.data) > 1])
        place = self.pick(data, list(range(len(process.data))))
        process.data.rotate(-place)
        if twice:
            process.data.append(process.data[0])
        self.deliver_data(process)

    @precondition(lambda self: self.in_flight())
    @rule()
    def deliver_all(self) -> None:
        while self.in_flight():
            for process, way in self.in_flight():
                step = {"up": self.deliver_up, "down": self.deliver_down, "data": self.deliver_data}[way]
                if getattr(process, way):
                    step(process)

    def stale(self) -> list[tuple[WriterId, Any]]:
        """Return messages about grants that are over, or that are another writer's."""
        named = [
            message for message in self.past if isinstance(message, SendCommit | SendStopped | SendPushed)
        ]
        named += [SendStopped(ref) for _, ref in self.writing()]
        # The slot of an open grant under an earlier generation of it.
        named += [SendStopped(ref._replace(generation=ref.generation - 1)) for _, ref in self.writing()]
        granted = {grant.ref: writer for writer, grant in self.receiver.open_grants()}
        writers = [process.id for process in self.processes]
        return [(w, m) for m in named[-16:] for w in writers if granted.get(m.ref) != w]

    @precondition(lambda self: self.stale())
    @rule(data=st.data())
    def message_of_a_foreign_or_stale_grant(self, data: st.DataObject) -> None:
        writer, message = self.pick(data, self.stale())
        stale, outcome = self.receiver.stats().stale_messages, dict(self.outcome)
        self.receive(writer, message)
        assert self.receiver.stats().stale_messages == stale + 1
        assert self.outcome == outcome

    @precondition(lambda self: any(process.held for process in self.processes if process.linked_there))
    @rule(data=st.data())
    def decode_side_loses_link(self, data: st.DataObject) -> None:
        linked = [process for process in self.processes if process.linked_there]
        if not linked:
            return
        process = self.pick(data, linked)
        process.linked_there = False
        process.up.clear()
        self.perform(self.receiver.link_lost(process.id))
        if not process.in_place:
            # The data socket is closed with the stream, which for a copying transport is the proof.
            process.data.clear()
            self.perform(self.receiver.writer_dead(process.id, SOCKET))

    @precondition(lambda self: any(not process.linked_there for process in self.processes))
    @rule()
    def prefill_side_notices_then_relinks(self) -> None:
        for process in self.processes:
            if process.linked_there:
                continue
            if process.sender.linked:
                process.down.clear()
                process.grants.clear()
                self.send(process, process.sender.link_lost())
            else:
                self.link(process)

    def lost_in_place(self) -> list[Process]:
        return [p for p in self.processes if p.in_place and not p.linked_there and not p.sender.linked]

    @precondition(lambda self: self.lost_in_place())
    @rule(data=st.data())
    def comes_back_to_copy(self, data: st.DataObject) -> None:
        """Link a writer in place that cannot map the memory once more; what it maps it may still write."""
        process = self.pick(data, self.lost_in_place())
        process.in_place = process.reads = False
        self.link(process)

    @precondition(lambda self: any(process.held for process in self.processes))
    @rule(data=st.data())
    def sigkill(self, data: st.DataObject) -> None:
        self.kill(self.pick(data, [process for process in self.processes if process.held]))

    # -- invariants

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "pool"):
            self.pool.invariants()

    @invariant()
    def writable_blocks_have_no_other_owner(self) -> None:
        if not hasattr(self, "pool"):
            return
        granted = {grant.ref: grant for _, grant in self.receiver.open_grants()}
        owned = {block for done in self.owned.values() for block in done.held}
        seen: set[int] = set()
        for grant in granted.values():
            fresh = set(grant.allocated)
            assert not fresh & seen, "a block is in two grants"
            assert not fresh & owned, "a block that was handed off is still granted"
            assert all(self.pool.references(b) == 1 or b in self.pool._quarantine for b in fresh)
            seen |= fresh
        for process in self.processes:
            for ref, grant in process.held.items():
                if ref not in process.mapped:
                    continue
                assert ref in granted, "a block is back while its writer may write"
                assert granted[ref].block_ids[: len(grant.block_ids)] == list(grant.block_ids)
                if process.mapped[ref]:
                    pinned = granted[ref].pinned
                    assert all(self.pool.references(b) for b in pinned), "a block that is read is free"

    @invariant()
    def block_states_add_up_to_the_pool(self) -> None:
        """Count the blocks by their owners, not by the pool's own counts."""
        if not hasattr(self, "pool"):
            return
        pool, times = self.pool, Counter[int]()
        for done in self.owned.values():
            times.update(done.held)
        quarantined = 0
        for attempt in self.receiver._transfers.grants:
            if attempt.phase is ReceiverPhase.QUARANTINED:
                quarantined += len(attempt.open_grant.allocated)
                if attempt.open_grant.reads_prefix:
                    times.update(attempt.open_grant.pinned)
            else:
                times.update(attempt.open_grant.held)
        assert all(pool.references(block) == times[block] for block in range(self.total))
        shared = sum(count > 1 for count in times.values())
        resting = pool.cached() - sum(pool._cache.key_of(block) is not None for block in times)
        assert pool.free() + resting + (len(times) - shared) + shared + quarantined == self.total

    def teardown(self) -> None:
        """Let every writer stop and send its messages: every block returns, without one death."""
        if not hasattr(self, "pool"):
            return
        self.running = 0
        self.unasked.clear()
        for process in list(self.processes):
            if not process.linked_there:
                if process.sender.linked:
                    process.sender.link_lost()
                process.down.clear()
                self.link(process)
        for _ in range(len(self.attempts) + 3):
            for done in [self.owned.pop(key) for key in list(self.owned)]:
                self.release(done)
            for process in self.processes:
                while process.up or process.down or process.data:
                    for way, step in (
                        (process.up, self.deliver_up),
                        (process.down, self.deliver_down),
                        (process.data, self.deliver_data),
                    ):
                        if way:
                            step(process)
                for key in list(process.sender._attempts):
                    self.send(process, process.sender.withdraw(key))
                for ref in process.sender.held_grants():
                    self.send(process, process.sender.stop(ref))
        self.pool.invariants()
        assert self.receiver.open_grants() == []
        for key in list(self.attempts):
            self.perform(self.receiver.cancel(key))
            self.outcome.setdefault(key, "cancelled")
        assert self.pool.quarantined() == 0
        self.pool.clear_cache()
        assert self.pool.available() == self.total


class WindowHandoffMachine(HandoffMachine):
    """Grants with full blocks, and a ring of two windowed ones a place."""

    total = 3 * POOL
    groups = WindowGroups(3, 1, 2, ((1, 0), (0, 0), (2, 0)))


def digest(ref: GrantRef, index: int) -> bytes:
    return f"{ref.generation}/{index}".encode()


TestHandoff = HandoffMachine.TestCase
TestHandoff.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestWindowHandoff = WindowHandoffMachine.TestCase
TestWindowHandoff.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)


def walk(machine: HandoffMachine, rng: random.Random, steps: int, losses: int = 1) -> None:
    """Take a long random walk, which reaches states that hypothesis' short programs seldom reach.

    `losses` is the weight of lost links.
    """
    for _ in range(steps):
        writing = machine.writing()
        unlinked = [process for process in machine.processes if not process.linked_there]
        steps_now: list[tuple[int, Any]] = [
            (4, lambda: machine.attach(rng.randint(1, 24), rng.randint(0, 1), rng.random() < 0.5, 0, False)),
            (1, lambda: machine.attach(rng.randint(1, 9), rng.randint(0, 1), False, 1, rng.random() < 0.5)),
            (1, lambda: machine.run_sequences(rng.randint(0, 2))),
            (1, lambda: machine.tick(rng.choice([0.3, 2.0]))),
        ]
        if machine.in_flight():
            steps_now.append((12, lambda: machine.deliver(rng, rng.choice([1, 1, 3]))))
        if any(len(process.data) > 1 for process in machine.processes):
            steps_now.append((3, lambda: machine.data_overtakes(rng, rng.random() < 0.3)))
        if machine.unasked:
            steps_now.append((5, lambda: machine.ask(rng)))
        if any(process.grants for process in machine.processes):
            steps_now.append((4, machine.start_writing))
        if writing:
            steps_now += [
                (2, lambda: machine.push(rng, rng.randint(1, 12))),
                (3, lambda: machine.commit(rng, rng.random() < 0.1)),
                (2, lambda: machine.stop(rng, rng.random() < 0.5)),
                (losses, lambda: machine.decode_side_loses_link(rng)),
                (1, lambda: machine.sigkill(rng)),
            ]
        if unlinked:
            steps_now.append((4, machine.prefill_side_notices_then_relinks))
        if machine.lost_in_place():
            steps_now.append((2 * losses, lambda: machine.comes_back_to_copy(rng)))
        if any(process.sender._attempts for process in machine.processes):
            steps_now.append((1, lambda: machine.withdraw(rng)))
        if len(machine.outcome) < len(machine.attempts):
            steps_now.append((1, lambda: machine.cancel(rng)))
        if machine.receiver.open_grants():
            steps_now.append((1, machine.abort_newest))
        if machine.stale():
            steps_now.append((1, lambda: machine.message_of_a_foreign_or_stale_grant(rng)))
        if machine.owned:
            steps_now.append((3, lambda: machine.finish(rng)))
        rng.choices([step for _, step in steps_now], [weight for weight, _ in steps_now])[0]()
        machine.every_block_is_in_one_state()
        machine.writable_blocks_have_no_other_owner()
    machine.teardown()


@pytest.mark.parametrize("seed", range(8))
def test_random_walks_keep_every_invariant(seed: int) -> None:
    rng = random.Random(seed)
    ways: set[str] = set()
    for _ in range(60):
        machine = HandoffMachine()
        machine.build()
        walk(machine, rng, 120, rng.choice([1, 10]))
        ways |= set(machine.outcome.values())
    assert ways == {"ready", "failed", "cancelled", "preempted"}
