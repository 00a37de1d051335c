from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from diptych.runtime.discovery.prefix_index import PrefixEvent, PrefixIndex, PrefixSnapshot
from diptych.runtime.discovery.records import Identity

LIFE = Identity(5, 1)
KEYS = [bytes([i]) * 16 for i in range(40)]


@given(st.integers(0, 40), st.integers(0, 40))
def test_leading_hits_are_the_common_prefix(held: int, asked: int) -> None:
    index = PrefixIndex()
    index.load(PrefixSnapshot("w", LIFE, 1, KEYS[:held]))
    assert index.leading_hits("w", LIFE, KEYS[:asked]) == min(held, asked)
    assert index.leading_hits("w", Identity(5, 2), KEYS[:asked]) == 0
    assert index.leading_hits("w", Identity(6, 1), KEYS[:asked]) == 0
    assert index.leading_hits("other", LIFE, KEYS[:asked]) == 0


def test_an_update_that_was_lost_is_noticed() -> None:
    index = PrefixIndex()
    index.load(PrefixSnapshot("w", LIFE, 1, KEYS[:2]))
    lost, heard = (PrefixEvent("w", LIFE, seq, added=(KEYS[seq],)) for seq in (2, 3))
    assert not index.apply(heard), "the next snapshot is wanted"
    assert index.leading_hits("w", LIFE, KEYS) == 2
    assert index.apply(lost)
    assert index.apply(heard)
    assert index.leading_hits("w", LIFE, KEYS) == 4


def test_updates_of_another_life() -> None:
    index = PrefixIndex()
    assert not index.apply(PrefixEvent("w", LIFE, 1))
    index.load(PrefixSnapshot("w", Identity(5, 2), 3, KEYS[:2]))
    assert index.apply(PrefixEvent("w", Identity(5, 1), 9, removed=(KEYS[0],))), "an old epoch's straggler"
    assert index.leading_hits("w", Identity(5, 2), KEYS) == 2
    assert not index.apply(PrefixEvent("w", Identity(5, 3), 1)), "a new epoch starts from a snapshot"
    assert not index.apply(PrefixEvent("w", Identity(6, 1), 1)), "so does a new incarnation"
    index.drop("w")
    assert index.position("w") is None
    assert index.blocks("w") == 0


def test_blocks_in_tiers_count_after_those_in_the_pool_and_only_without_a_gap() -> None:
    index = PrefixIndex()
    index.load(PrefixSnapshot("w", LIFE, 1, KEYS[:4], KEYS[4:7]))
    assert index.leading_hits("w", LIFE, KEYS) == 4
    assert index.tier_hits("w", LIFE, KEYS, 4) == 3
    assert index.tier_hits("w", Identity(5, 2), KEYS, 4) == 0
    assert index.apply(PrefixEvent("w", LIFE, 2, removed=tuple(KEYS[2:4]), tiered=tuple(KEYS[2:4])))
    assert index.leading_hits("w", LIFE, KEYS) == 2
    assert index.tier_hits("w", LIFE, KEYS, 2) == 5
    assert index.apply(PrefixEvent("w", LIFE, 3, added=(KEYS[2],), removed=(KEYS[4],)))
    assert index.leading_hits("w", LIFE, KEYS) == 3
    assert index.tier_hits("w", LIFE, KEYS, 3) == 1, "the one after it is gone"
    assert index.tier_hits("other", LIFE, KEYS, 0) == 0


@dataclass
class Worker:
    """Contents of a worker's cache and tiers, and the stream as Redis keeps it."""

    keys: list[bytes] = field(default_factory=list)
    tiered: set[bytes] = field(default_factory=set)
    seq: int = 1
    stream: list[PrefixEvent] = field(default_factory=list)


class LossyStream(RuleBasedStateMachine):
    """Updates come twice, late, or not at all: an index that has caught up equals the worker's cache."""

    @initialize()
    def begin(self) -> None:
        self.worker = Worker()
        self.index = PrefixIndex()
        self.next = 0
        self.index.load(PrefixSnapshot("w", LIFE, 1, []))

    @rule(count=st.integers(1, 4))
    def grow(self, count: int) -> None:
        added = tuple(KEYS[len(self.worker.keys) : len(self.worker.keys) + count])
        self.worker.keys += added
        self.worker.tiered -= set(added)
        self._publish(PrefixEvent("w", LIFE, self.worker.seq + 1, added=added))

    @rule(count=st.integers(1, 4), kept=st.booleans())
    def evict_leaves(self, count: int, kept: bool) -> None:
        keep = max(0, len(self.worker.keys) - count)
        removed = tuple(self.worker.keys[keep:])
        del self.worker.keys[keep:]
        tiered = removed if kept else ()
        self.worker.tiered |= set(tiered)
        self._publish(PrefixEvent("w", LIFE, self.worker.seq + 1, removed=removed, tiered=tiered))

    @rule(count=st.integers(1, 4))
    def a_tier_lets_go(self, count: int) -> None:
        removed = tuple(sorted(self.worker.tiered)[:count])
        self.worker.tiered -= set(removed)
        self._publish(PrefixEvent("w", LIFE, self.worker.seq + 1, removed=removed))

    def _publish(self, event: PrefixEvent) -> None:
        self.worker.seq = event.seq
        self.worker.stream.append(event)

    @rule(repeat=st.booleans())
    def deliver(self, repeat: bool) -> None:
        for _ in range(1 + repeat):
            if self.next < len(self.worker.stream) and not self.index.apply(self.worker.stream[self.next]):
                self.reload()
        self.next = min(self.next + 1, len(self.worker.stream))

    @rule()
    def lose(self) -> None:
        self.next = min(self.next + 1, len(self.worker.stream))

    @rule(late=st.integers(0, 5))
    def deliver_again(self, late: int) -> None:
        if late < self.next and not self.index.apply(self.worker.stream[late]):
            self.reload()

    @rule()
    def reload(self) -> None:
        worker = self.worker
        self.index.load(PrefixSnapshot("w", LIFE, worker.seq, list(worker.keys), set(worker.tiered)))

    @invariant()
    def what_is_up_to_date_is_right(self) -> None:
        position = self.index.position("w")
        assert position is not None
        if position[1] == self.worker.seq:
            assert self.index.blocks("w") == len(self.worker.keys)
            first = self.index.leading_hits("w", LIFE, KEYS)
            assert first == len(self.worker.keys)
            held = set(self.worker.keys) | self.worker.tiered
            there = [key in held for key in (*KEYS[first:], b"none")].index(False)
            assert self.index.tier_hits("w", LIFE, KEYS, first) == there


TestLossyStream = LossyStream.TestCase
