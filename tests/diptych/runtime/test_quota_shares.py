"""Quotas of KV memory: several gateways never hold more than there is, whatever becomes of the table."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diptych.runtime.discovery.quota_shares import (
    LEASE_S,
    MemoryNeed,
    Quota,
    QuotaLine,
    QuotaTable,
    take_turn,
)

CAPACITY = 1000
_turn = take_turn


class Gateway:
    """Gateway that admits within its quota, and reserves what it admits."""

    def __init__(self) -> None:
        self.quota: int | None = None
        self.reserved = 0
        self.waiting = 0

    def need(self) -> MemoryNeed:
        return MemoryNeed(CAPACITY, self.reserved, self.waiting, self.quota)

    def admit(self) -> None:
        room = (self.quota or 0) - self.reserved
        admitted = min(self.waiting, max(room, 0))
        self.waiting -= admitted
        self.reserved += admitted


class Quotas(RuleBasedStateMachine):
    """Gateways that take turns at a table, which freezes and is flushed; each turn is written at once."""

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.now = 100.0
        self.frozen = False
        self.table: QuotaTable | None = None
        self.gateways = {str(number): Gateway() for number in range(count)}
        for name in self.gateways:
            self.turn(name)

    def turn(self, name: str) -> None:
        gateway = self.gateways[name]
        quota, self.table = _turn(name, gateway.need(), self.table, self.now)
        gateway.quota = quota.held
        assert quota.held <= max(quota.attainable, gateway.reserved)
        gateway.admit()

    def pick(self, number: int) -> str:
        return sorted(self.gateways)[number % len(self.gateways)]

    @precondition(lambda self: not self.frozen)
    @rule()
    def all_take_turns(self) -> None:
        self.now += 0.25
        for name in self.gateways:
            self.turn(name)

    @rule(number=st.integers(0, 3), tokens=st.integers(1, 1500))
    def requests_come(self, number: int, tokens: int) -> None:
        gateway = self.gateways[self.pick(number)]
        gateway.waiting += tokens
        gateway.admit()

    @rule(number=st.integers(0, 3), part=st.floats(0, 1))
    def requests_end(self, number: int, part: float) -> None:
        gateway = self.gateways[self.pick(number)]
        gateway.reserved -= int(gateway.reserved * part)
        gateway.admit()

    @rule(seconds=st.floats(0.0, 8.0))
    def table_freezes_for(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def table_is_flushed(self) -> None:
        self.table = None

    @rule()
    def gateway_joins_a_table_that_is_known(self) -> None:
        if self.table is not None and len(self.gateways) < 6 and not self.table_is_short():
            self.now += 0.01
            name = str(len(self.gateways))
            self.gateways[name] = Gateway()
            self.turn(name)

    def table_is_short(self) -> bool:
        return self.table is None or not self.gateways.keys() <= self.table.lines.keys()

    @invariant()
    def reserved_fits(self) -> None:
        if hasattr(self, "gateways"):
            assert sum(one.reserved for one in self.gateways.values()) <= CAPACITY


TestQuotas = Quotas.TestCase
TestQuotas.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_control_a_table_that_forgets_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(
        name: str, need: MemoryNeed, table: QuotaTable | None, now: float
    ) -> tuple[Quota, QuotaTable]:
        return take_turn(name, need, table and QuotaTable(table.lines, 0.0, now), now)

    monkeypatch.setattr(f"{__name__}._turn", forgetful)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Quotas, settings=settings(max_examples=300, deadline=None, database=None, phases=[Phase.generate])
        )


def told(table: QuotaTable | None, name: str, **need: int) -> tuple[int, QuotaTable]:
    known = MemoryNeed(CAPACITY, need.get("reserved", 0), need.get("waiting", 0), need.get("quota"))
    quota, after = take_turn(name, known, table, need.get("now", 10))
    return quota.held, after


def test_one_gateway_alone_holds_everything_at_once() -> None:
    held, table = told(None, "a")
    assert held == CAPACITY
    assert table.lines["a"].wanted == CAPACITY


def test_second_gateway_gets_its_half_when_the_first_has_given_way() -> None:
    _, table = told(None, "a")
    held, table = told(table, "b", waiting=5000)
    assert held == 0, "the first one still holds everything"
    held, table = told(table, "a", reserved=100, quota=CAPACITY)
    assert held == 100 + 125, "what runs, and a quarter of an equal share"
    held, table = told(table, "b", waiting=5000)
    assert held == CAPACITY - 225, "what nobody wants is had by who does"
    held, table = told(table, "a", reserved=100, waiting=5000, quota=225)
    assert held == 225, "nothing is free"
    held, table = told(table, "b", reserved=100, waiting=5000, quota=775)
    assert held == 500, "the other wants its half"
    held, table = told(table, "a", reserved=100, waiting=5000, quota=225)
    assert held == 500


def test_gateway_that_is_gone_leaves_its_memory_after_a_lease() -> None:
    table = QuotaTable({"a": QuotaLine(900, 900, 10.0)}, settled_at=0.0, touched_at=10.0)
    for step in range(1, 12):
        held, table = told(table, "b", waiting=5000, now=10 + step / 4, quota=100)
        assert held == 100
    held, table = told(table, "b", waiting=5000, now=10 + LEASE_S + 0.1, quota=100)
    assert held == CAPACITY


@pytest.mark.parametrize("silent_s", [LEASE_S, 60.0])
def test_quotas_do_not_grow_right_after_a_table_that_stood_still(silent_s: float) -> None:
    table = QuotaTable({"a": QuotaLine(900, 900, 10.0)}, settled_at=0.0, touched_at=10.0)
    held, table = told(table, "b", waiting=5000, now=10 + silent_s, quota=100)
    assert held == 100, "the other one may live: it could not write either"
    now = 10 + silent_s + LEASE_S / 2
    while now < 10 + silent_s + LEASE_S:
        held, table = told(table, "b", waiting=5000, now=now, quota=held)
        assert held == 100
        now += 0.25
    assert told(table, "b", waiting=5000, now=now, quota=held)[0] == CAPACITY


@given(
    lines=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 2000)), max_size=5),
    waiting=st.integers(0, 3000),
)
def test_quota_is_never_more_than_the_others_leave(lines: list[tuple[int, int]], waiting: int) -> None:
    others = {str(number): QuotaLine(held, wanted, 10.0) for number, (held, wanted) in enumerate(lines)}
    table = QuotaTable(others, settled_at=0.0, touched_at=10.0)
    held, _ = told(table, "me", waiting=waiting)
    assert 0 <= held <= max(CAPACITY - sum(line.held for line in others.values()), 0)
