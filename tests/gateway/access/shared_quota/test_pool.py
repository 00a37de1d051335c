"""Slices of quotas over virtual time: several gateways, lost answers, outages; never more than there is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.errors import QuotaExceeded
from gateway.access.quota import MINUTE_S, Quota, QuotaUsage
from gateway.access.shared_quota.pool import LEASE_S, PoolTable, Turn, take_slice
from gateway.access.shared_quota.slices import PoolView, QuotaSlice
from gateway.access.shared_quota.store import pool_key, read_pool, written_pool


@dataclass
class Member:
    """A gateway: its slice, and the usage that is charged to it."""

    name: str
    slice: QuotaSlice
    usage: QuotaUsage
    view: PoolView


class SliceLease:
    """Lease whose turns the test takes."""

    def __init__(self, held: QuotaSlice) -> None:
        self.requests, self.tokens, self.slots = held.requests, held.tokens, held.slots

    async def prepare(self, requests: int, prompt_tokens: int) -> None: ...

    def used(self) -> None: ...


@dataclass
class World:
    """Gateways over one pool, on a clock of its own. `shared` is False in the controls."""

    quota: Quota
    gateways: int
    shared: bool = True
    now: float = 1000.0
    table: PoolTable | None = None
    reachable: bool = True
    members: list[Member] = field(default_factory=list)
    taken: int = 0
    hints: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(self.gateways):
            view = PoolView(gateways=self.gateways)
            held = QuotaSlice(self.quota, view)
            usage = QuotaUsage("k", self.quota, SliceLease(held) if self.shared else None)
            self.members.append(Member(str(number), held, usage, view))

    def turn(
        self,
        member: Member,
        requests: int = 0,
        tokens: int = 0,
        *,
        lost: str = "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a turn; `lost` is "before" it happened, or "after" it. `meanwhile` comes on both ways."""
        ask = member.slice.ask(requests, tokens, self.now)
        meanwhile()
        if not self.reachable or lost == "before":
            member.view.answers = False
            return
        turn = Turn(member.name, self.now, self.gateways)
        grant, after = take_slice(self.quota, ask, self.table, turn)
        self.table = read_pool({bytes(k): str(v).encode() for k, v in written_pool(after).items()})
        meanwhile()
        if lost == "after":
            member.view.answers = False
            return
        member.slice.granted(grant, self.now)
        member.view.answers = True

    def begin(self, member: Member, tokens: int = 1, *, lost: str = "", turns: bool = True) -> bool:
        """Begin a request as the gateway does; return whether it was admitted."""
        if self.shared and turns:
            for amount in (0, tokens):
                if member.view.answers and member.slice.lacks(1, amount, self.now):
                    self.turn(member, 1, amount, lost=lost)
        try:
            member.usage.begin(tokens, self.now)
        except QuotaExceeded as error:
            self.hints.append(error.retry_after_s or 0.0)
            return False
        self.taken += 1
        return True

    def tick(self, seconds: float) -> None:
        """Let time pass; once a second each gateway takes a turn if it holds anything."""
        while seconds > 0:
            self.now += min(seconds, 1.0)
            seconds -= 1.0
            for member in self.members:
                if self.shared and not member.slice.idle:
                    self.turn(member)


@pytest.mark.parametrize("split", ["000", "111", "001", "010", "100", "011", "012", "221"])
@pytest.mark.parametrize("gap_s", [0.0, 0.4])
def test_three_of_a_minute_pass_wherever_they_come(split: str, gap_s: float) -> None:
    world = World(Quota(requests_per_minute=3), gateways=3)
    for name in split:
        assert world.begin(world.members[int(name)])
        world.tick(gap_s)
    assert not any(world.begin(member) for member in world.members)


def test_control_gateways_that_count_alone_admit_a_quota_each() -> None:
    world = World(Quota(requests_per_minute=3), gateways=3, shared=False)
    assert sum(world.begin(member) for member in world.members for _ in range(4)) == 9


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_places_are_shared_and_come_back(limit: int) -> None:
    world = World(Quota(concurrent_requests=limit), gateways=2)
    first, second = world.members
    for _ in range(3):
        assert all(world.begin(first) for _ in range(limit))
        assert not world.begin(first)
        assert not world.begin(second)
        world.tick(0.5)
        for _ in range(limit):
            first.usage.end(0)
        world.tick(1.0)
        assert first.slice.idle
        first, second = second, first


def test_places_of_a_gateway_that_died_are_free_after_its_lease() -> None:
    world = World(Quota(concurrent_requests=2), gateways=2)
    dead, living = world.members
    assert world.begin(dead)
    assert world.begin(living)
    world.members = [living]
    world.tick(LEASE_S - 1.0)
    assert not world.begin(living)
    world.tick(1.5)
    assert world.begin(living)
    assert not world.begin(living)


def test_table_that_lost_its_lines_gives_no_place_twice() -> None:
    """The third gateway, which knows nothing, is the one that would take them."""
    world = World(Quota(concurrent_requests=4), gateways=3)
    first, second, _ = world.members
    assert all(world.begin(member) for member in (first, second) for _ in range(2))
    world.table = None
    assert not world.begin(first)
    world.tick(1.0)  # both write their lines again
    assert not any(world.begin(member) for member in world.members)


def test_pool_that_lost_its_table_remembers_what_was_used() -> None:
    world = World(Quota(requests_per_minute=10), gateways=2)
    first, second = world.members
    assert all(world.begin(first) for _ in range(8))
    world.table = None
    assert sum(world.begin(first) for _ in range(9)) == 2
    assert not world.begin(second)


def test_lines_that_none_could_write_count_until_all_had_time_to_write_them() -> None:
    world = World(Quota(concurrent_requests=2), gateways=3)
    first, second, newcomer = world.members
    assert world.begin(first)
    assert world.begin(second)
    world.reachable = False
    world.tick(2 * LEASE_S)
    world.reachable = True
    world.turn(first)
    assert not world.begin(first), "the other one lives, and could not say so"
    assert not world.begin(newcomer)
    world.turn(second)
    assert not world.begin(first)


def test_outage_lends_and_does_not_give() -> None:
    """Each goes on with its part, and pays it back."""
    world = World(Quota(requests_per_minute=60), gateways=2)
    first, second = world.members
    assert world.begin(first)
    world.reachable = False
    world.turn(first)
    world.turn(second)
    assert sum(world.begin(first) for _ in range(100)) <= 30
    assert sum(world.begin(second) for _ in range(100)) == 30, "a first use without an answer"
    world.tick(10.0)
    again = [sum(world.begin(member) for _ in range(100)) for member in world.members]
    assert max(again) <= 5, "half of ten seconds' worth each"
    world.reachable = True
    world.tick(1.0)
    world.tick(0.5)
    assert world.taken <= 60 + 10 + 1
    assert sum(world.begin(member) for member in world.members for _ in range(100)) <= 3


def credit(world: World) -> float:
    """Return what the gateways hold of requests, less what the pool has not been told of."""
    slices = [member.slice.requests for member in world.members]
    return sum(one._credit - one._grown for one in slices if one is not None)


def crowd(world: World) -> None:
    """Begin what fits, in the middle of a turn."""
    for one in world.members:
        world.begin(one, turns=False)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "crowd", "tick", "lose", "outage", "refund"]),
        st.integers(0, 2),
        st.floats(0, 4),
    ),
    max_size=80,
)


@given(st.integers(1, 300), STEPS)
def test_pool_and_slices_never_hold_more_than_the_quota_gave(
    per_minute: int, steps: list[tuple[str, int, float]]
) -> None:
    world = World(Quota(requests_per_minute=per_minute), gateways=3)
    started, losses = world.now, 0
    for what, number, seconds in steps:
        member = world.members[number]
        if what == "begin":
            world.begin(member)
        elif what == "lose":
            losses += 1
            world.begin(member, lost="after" if seconds > 2 else "before")
        elif what == "crowd":
            world.turn(member, 1, meanwhile=lambda: crowd(world))
        elif what == "tick":
            world.tick(seconds)
        elif what == "outage":
            world.reachable = not world.reachable
            losses += not world.reachable
        elif member.usage.running:
            member.usage.refused(1)
            world.taken -= 1
        if world.table is None or world.table.requests is None:
            continue
        left = world.table.requests
        level = left.amount + (world.now - left.at) * per_minute / MINUTE_S
        given = per_minute + (world.now - started) * per_minute / MINUTE_S
        assert level + credit(world) + world.taken <= given + 1e-3
        if not losses:
            assert world.taken <= given + 1e-3
    assert all(hint > 0 for hint in world.hints)


@given(st.integers(1, 12), st.integers(0, 2**32))
def test_places_never_exceed_the_limit(limit: int, seed: int) -> None:
    world, dice = World(Quota(concurrent_requests=limit), gateways=3), random.Random(seed)
    for _ in range(100):
        member = dice.choice(world.members)
        move = dice.random()
        if move < 0.5:
            world.begin(member)
        elif move < 0.8 and member.usage.running:
            member.usage.end(1)
        elif move < 0.85:
            world.turn(member, lost=dice.choice(["before", "after"]))
            world.turn(member)
        elif move < 0.95:
            world.turn(member, meanwhile=lambda: crowd(world))
        else:
            world.tick(dice.uniform(0, 2))
        assert sum(one.usage.running for one in world.members) <= limit


@given(st.integers(10, 2000), st.integers(0, 2**32))
def test_tokens_of_all_gateways_are_bounded(per_minute: int, seed: int) -> None:
    world, dice = World(Quota(tokens_per_minute=per_minute), gateways=3), random.Random(seed)
    started, tokens, longest = world.now, 0, 0
    for _ in range(30):
        prompt, output = dice.randrange(1, 60), dice.randrange(60)
        member = dice.choice(world.members)
        if world.begin(member, prompt):
            member.usage.end(output)
            tokens, longest = tokens + prompt + output, max(longest, prompt + output)
        world.tick(dice.uniform(0, 1.5))
    bound = per_minute + (world.now - started) * per_minute / MINUTE_S + 3 * longest
    assert tokens <= bound + 1e-3


def test_busy_key_seldom_needs_the_pool() -> None:
    """Twenty requests a second at each of two gateways: two turns a second at each, and few waits."""
    world = World(Quota(requests_per_minute=6000), gateways=2)
    waits = 0
    for step in range(400):
        for member in world.members:
            waits += member.slice.lacks(1, 0, world.now)
            assert world.begin(member)
        world.now += 0.05
        if step % 20 == 19:
            for member in world.members:
                world.turn(member)
    assert waits <= 4


def test_changed_quota_has_a_pool_of_its_own() -> None:
    keys = {pool_key("k", Quota(5, 6, 7)), pool_key("k", Quota(5, 6)), pool_key("k", Quota(56))}
    assert len(keys) == 3
