"""The table of quotas in a real Redis-protocol server: many gateways at once, a freeze, a flush, junk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from diptych.runtime.discovery import store as names
from diptych.runtime.discovery.quota_shares import MemoryNeed
from diptych.runtime.discovery.quota_table import QuotaTableStore, quota_key
from tests.diptych.runtime.conftest import Store

CAPACITY = 1200
pytestmark = pytest.mark.asyncio


class Gateways:
    def __init__(self, url: str) -> None:
        self.tables = {name: QuotaTableStore(url, "d", name) for name in ("a", "b", "c")}
        self.held: dict[str, int | None] = dict.fromkeys(self.tables)

    async def turn(self, name: str, waiting: int = 5000) -> None:
        need = MemoryNeed(CAPACITY, 0, waiting, self.held[name])
        quota = await self.tables[name].take_turn(need)
        if quota is not None:
            self.held[name] = quota.held

    async def all_at_once(self, rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.gather(*(self.turn(name) for name in self.tables))

    @property
    def total(self) -> int:
        return sum(held or 0 for held in self.held.values())


@pytest_asyncio.fixture
async def gateways(store: Store) -> AsyncIterator[Gateways]:
    made = Gateways(store.url)
    yield made
    for table in made.tables.values():
        await table.close()


async def test_gateways_that_take_turns_at_once_share_equally(gateways: Gateways) -> None:
    await gateways.turn("a")
    assert gateways.held["a"] == CAPACITY
    await gateways.all_at_once(12)
    assert gateways.held == {"a": 400, "b": 400, "c": 400}


async def test_frozen_store_costs_half_a_second_and_no_quota(gateways: Gateways, store: Store) -> None:
    await gateways.turn("a")
    await gateways.all_at_once(12)
    store.freeze()
    with pytest.raises(names.STORE_ERRORS):
        await gateways.turn("a")
    store.thaw()
    await gateways.all_at_once(3)
    assert gateways.total == CAPACITY


async def test_flushed_store_lets_no_quota_grow(gateways: Gateways, store: Store) -> None:
    await gateways.turn("a")
    await gateways.all_at_once(12)
    store.client().flushall()
    await gateways.turn("a")
    assert gateways.held["a"] == 400, "the others are not in the table yet"
    await gateways.all_at_once(3)
    assert gateways.total == CAPACITY


async def test_junk_among_the_lines_is_passed_over(gateways: Gateways, store: Store) -> None:
    await gateways.turn("a")
    store.client().hset(quota_key("d"), mapping={b"\xff": "1 2 3", "x": "much", "y": "1 2"})
    await gateways.turn("b", waiting=0)
    await gateways.turn("a")
    assert gateways.held["a"] == CAPACITY - 150, "b alone is beside it, and has wanted a quarter of its half"
    assert set(store.client().hkeys(quota_key("d"))) == {b"", b"a", b"b"}
