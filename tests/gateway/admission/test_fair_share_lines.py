"""Lines that gateways write of what each tenant got: counters, readers, and what a table may hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.fair_share_lines import (
    GONE_S,
    IDLE_S,
    LEASE_S,
    MOST_TENANTS,
    GatewayLine,
    OtherLines,
    ServedHere,
    TenantUse,
    decode_line,
    encode_line,
)


def line(turn: int, **tenants: tuple[int, int]) -> GatewayLine:
    return GatewayLine(turn, {name: TenantUse(*use) for name, use in tenants.items()})


def test_own_line_counts_up_and_forgets_idle_tenants() -> None:
    here = ServedHere()
    here.add("a", 100)
    here.add("a", 20)
    assert here.next_line({"b": 2}, 0.0) == line(1, a=(120, 0), b=(0, 2))
    here.add("a", 1)
    assert here.next_line({}, 1.0) == line(2, a=(121, 0), b=(0, 0))
    assert here.next_line({"b": 1}, 0.5 + IDLE_S) == line(3, a=(121, 0), b=(0, 1))
    assert here.next_line({"b": 1}, 1.0 + IDLE_S) == line(4, b=(0, 1))


def test_own_line_has_the_tenants_that_were_served_most() -> None:
    here = ServedHere()
    for number in range(MOST_TENANTS + 5):
        here.add(str(number), number + 1)
    names = here.next_line({}, 0.0).tenants
    assert len(names) == MOST_TENANTS
    assert "4" not in names


def test_reader_charges_differences_only() -> None:
    others = OtherLines()
    first = others.read({"g": line(7, a=(5000, 1))}, 0.0)
    assert (first.served, first.running) == ({}, {"a": 1}), "what was served before it looked is no debt"
    second = others.read({"g": line(8, a=(5100, 0), b=(30, 2)), "h": line(1, a=(9, 3))}, 0.25)
    assert (second.served, second.running) == ({"a": 100, "b": 30}, {"a": 3, "b": 2})
    assert others.read({"g": line(8, a=(5100, 0)), "h": line(1, a=(9, 3))}, 0.5).served == {}
    restarted = others.read({"g": line(1, a=(40, 1))}, 0.75)
    assert restarted.served == {"a": 40}


def test_line_that_does_not_change_holds_no_places_and_is_removed_later() -> None:
    others = OtherLines()
    lines = {"g": line(1, a=(0, 4))}
    assert others.read(lines, 0.0).running == {"a": 4}
    gone = others.read(lines, LEASE_S)
    assert (gone.running, gone.dead) == ({}, ())
    assert others.read(lines, GONE_S).dead == ("g",)
    assert others.read({}, GONE_S + 1).dead == ()


def test_forgetful_reader_begins_anew() -> None:
    others = OtherLines()
    others.read({"g": line(1, a=(10, 0))}, 0.0)
    others.forget()
    assert others.read({"g": line(9, a=(90_000, 0))}, 60.0).served == {}


@pytest.mark.parametrize("seed", range(5))
def test_all_that_is_served_is_charged_once(seed: int) -> None:
    """Whatever turns are missed in between."""
    rng = random.Random(seed)
    here, others, table = ServedHere(), OtherLines(), {}
    table["g"] = here.next_line({}, 0.0)
    others.read(table, 0.0)
    served = charged = 0
    for step in range(1, 200):
        if rng.random() < 0.7:
            tokens = rng.randrange(1, 500)
            here.add("a", tokens)
            served += tokens
        if rng.random() < 0.4 or step == 199:
            table["g"] = here.next_line({}, step * 0.1)
        if rng.random() < 0.4 or step == 199:
            charged += others.read(table, step * 0.1).served.get("a", 0)
    assert charged == served


@given(
    st.integers(0, 10**9), st.dictionaries(st.text(), st.tuples(st.integers(0, 10**12), st.integers(0, 999)))
)
def test_encoded_lines_come_back(turn: int, tenants: dict[str, TenantUse]) -> None:
    made = GatewayLine(turn, tenants)
    assert decode_line(encode_line(made)) == made


@given(st.binary(max_size=60))
def test_foreign_lines_are_left_out(data: bytes) -> None:
    decode_line(data)
    for foreign in (b"", b"[]", b"{}", b'{"turn":1,"tenants":[]}', b'{"turn":"x","tenants":{}}', b"\xff"):
        assert decode_line(foreign) is None


def test_negative_counts_are_none() -> None:
    assert decode_line(b'{"turn":1,"tenants":{"a":[-5,-1]}}') == line(1, a=(0, 0))
