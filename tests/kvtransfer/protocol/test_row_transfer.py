"""Asks for images' rows: what comes late, damaged or out of turn is never read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.row_transfer import Arrival, RowAsks, RowsPart, part_checksum

KEY, DIGEST, WIDTH, ITEM = ("r", 1), b"i" * 32, 3, 4


def payload(first: int, rows: int) -> bytes:
    return bytes((first * WIDTH * ITEM + n) % 251 for n in range(rows * WIDTH * ITEM))


def part(generation: int, first: int, rows: int, total: int, digest: bytes = DIGEST) -> RowsPart:
    made = RowsPart(generation, first, rows, total, WIDTH, payload(first, rows), b"")
    return made._replace(checksum=part_checksum(digest, made))


def test_parts_in_order_make_the_rows() -> None:
    asks = RowAsks(ITEM)
    generation = asks.ask(KEY, DIGEST)
    assert asks.arrive(part(generation, 0, 2, 5)) == (Arrival.MORE, None)
    verdict, rows = asks.arrive(part(generation, 2, 3, 5))
    assert verdict is Arrival.COMPLETE
    assert rows is not None
    assert (rows.key, rows.digest, rows.total_rows, rows.width) == (KEY, DIGEST, 5, WIDTH)
    assert bytes(rows.data) == payload(0, 2) + payload(2, 3)
    assert asks.arrive(part(generation, 2, 3, 5)) == (Arrival.STALE, None)


def test_a_part_of_an_older_generation_is_stale() -> None:
    asks = RowAsks(ITEM)
    first = asks.ask(KEY, DIGEST)
    asks.drop({KEY})
    second = asks.ask(KEY, DIGEST)
    assert second > first
    assert asks.arrive(part(first, 0, 5, 5)) == (Arrival.STALE, None)
    assert asks.arrive(part(second, 0, 5, 5))[0] is Arrival.COMPLETE


@dataclass
class Fault:
    what: str

    def apply(self, sent: RowsPart) -> RowsPart:
        flipped = bytes([sent.data[0] ^ 1]) + sent.data[1:]
        signed = {
            "another image's": part(sent.generation, 0, 2, 5, b"j" * 32),
            "another place": part(sent.generation, 1, 2, 5),
            "too many rows": part(sent.generation, 0, 6, 5),
            "no rows": part(sent.generation, 0, 0, 5),
            "too large": part(sent.generation, 0, 2, 1 << 29),
        }
        if self.what == "flipped":
            return sent._replace(data=flipped)
        if self.what == "cut":
            return sent._replace(data=sent.data[:-1])
        if self.what == "an older ask's checksum":
            old = sent._replace(generation=sent.generation - 1)
            return sent._replace(checksum=part_checksum(DIGEST, old))
        return signed[self.what]


@pytest.mark.parametrize(
    "what",
    [
        "flipped",
        "cut",
        "an older ask's checksum",
        "another image's",
        "another place",
        "too many rows",
        "no rows",
        "too large",
    ],
)
def test_a_part_that_is_not_what_was_sent_closes_its_ask(what: str) -> None:
    asks = RowAsks(ITEM)
    generation = asks.ask(KEY, DIGEST)
    verdict, rows = asks.arrive(Fault(what).apply(part(generation, 0, 2, 5)))
    assert verdict is Arrival.DAMAGED
    assert rows is not None
    assert (rows.key, rows.digest, bytes(rows.data)) == (KEY, DIGEST, b"")
    assert asks.arrive(part(generation, 0, 2, 5)) == (Arrival.STALE, None)


def test_a_denied_ask_names_its_attempt_once() -> None:
    asks = RowAsks(ITEM)
    generation = asks.ask(KEY, DIGEST)
    assert asks.keys == {KEY}
    assert asks.deny(generation) == KEY
    assert asks.deny(generation) is None
    assert asks.keys == set()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=20))
def test_whatever_comes_in_any_order_is_read_only_where_it_belongs(
    events: list[tuple[int, int]],
) -> None:
    """Three asks of two parts each: one is complete only after its own two, in order."""
    asks = RowAsks(ITEM)
    generations = [asks.ask((f"r{n}", 1), DIGEST) for n in range(3)]
    seen: dict[int, list[int]] = {g: [] for g in generations}
    closed: set[int] = set()
    for number, what in events:
        generation = generations[number]
        sent = part(generation, 2 * (what % 2), 2, 4)
        verdict, rows = asks.arrive(sent)
        if generation in closed:
            assert verdict is Arrival.STALE
        elif what % 2 != len(seen[generation]):
            assert verdict is Arrival.DAMAGED
            closed.add(generation)
        else:
            seen[generation].append(what % 2)
            complete = len(seen[generation]) == 2
            assert verdict is (Arrival.COMPLETE if complete else Arrival.MORE)
            if complete:
                assert rows is not None
                assert bytes(rows.data) == payload(0, 2) + payload(2, 2)
                closed.add(generation)
