"""Several gateways admit against one store: together never more KV memory than the decode workers have."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from diptych.runtime.discovery import quota_shares
from diptych.runtime.discovery.quota_shares import MemoryNeed
from diptych.runtime.discovery.quota_table import QuotaTableStore
from gateway.admission.capacity import Capacity, KvBudget
from gateway.admission.gate import AdmissionGate
from gateway.admission.memory_quota import KEPT_PARTS, MemoryQuota, memory_need
from gateway.admission.queue import AdmissionQueue
from tests.diptych.runtime.conftest import Store
from tests.diptych.runtime.eventually import eventually

pytestmark = pytest.mark.asyncio
SIZE = 16
CAPACITY = 960
GATEWAYS = 3
LARGEST = 96
"""Tokens of KV memory that a client's request needs at most."""


class Gateway:
    """An admission gate with its quota, and clients that take and leave places."""

    def __init__(self, url: str, name: str) -> None:
        self.gate = AdmissionGate(AdmissionQueue(1000, 10_000_000), time.monotonic)
        self.gate.resize(Capacity(1000, 100, CAPACITY, SIZE))
        self.quota = MemoryQuota(self.gate, QuotaTableStore(url, "digest", name))

    @property
    def reserved(self) -> int:
        return self.gate.queue.kv.reserved

    async def client(self, dice: random.Random) -> None:
        """Send one request of up to a tenth of the memory, and hold it for a moment once it runs."""
        admitted = asyncio.Event()
        ticket = self.gate.enter(
            dice.randrange(1, 48),
            max_tokens=48,
            priority=0,
            time_left_s=None,
            on_admitted=lambda choices: admitted.set(),
        )
        await asyncio.wait_for(admitted.wait(), 60)
        self.gate.prefilled(ticket)
        await asyncio.sleep(dice.uniform(0, 0.05))
        self.gate.leave(ticket, 48)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "valkey")
    made.start()
    yield made
    made.kill()


@pytest_asyncio.fixture
async def gateways(store: Store) -> AsyncIterator[list[Gateway]]:
    made = [Gateway(store.url, str(number)) for number in range(GATEWAYS)]
    yield made
    for one in made:
        await one.quota.close()


async def most_reserved(gateways: list[Gateway], requests: int) -> int:
    """Send requests to all gateways at once; return the most that they had reserved together."""
    dice = random.Random(5)
    clients = [asyncio.create_task(one.client(dice)) for one in gateways for _ in range(requests)]
    most = 0
    while not all(client.done() for client in clients):
        most = max(most, sum(one.reserved for one in gateways))
        await asyncio.sleep(0.001)
    await asyncio.gather(*clients)
    return most


async def settled(gateways: list[Gateway]) -> None:
    """Wait until any request fits in any quota: a gateway that runs nothing admits one whatever its quota."""
    await eventually(lambda: all((one.gate.queue.kv.quota or 0) >= LARGEST for one in gateways))


async def test_three_gateways_never_reserve_more_than_there_is(
    gateways: list[Gateway], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All three are in one process, which a busy machine can stop for longer than a gateway may be silent.
    monkeypatch.setattr(quota_shares, "LEASE_S", 60.0)
    for one in gateways:
        one.quota.start()
    await settled(gateways)
    most = await most_reserved(gateways, 60)
    assert CAPACITY / 2 < most <= CAPACITY
    await settled(gateways)
    store.freeze()
    try:
        assert await most_reserved(gateways, 20) <= CAPACITY, "each keeps what it held"
    finally:
        store.thaw()
    await settled(gateways)
    assert await most_reserved(gateways, 20) <= CAPACITY


async def test_control_gateways_that_count_only_themselves_reserve_too_much(gateways: list[Gateway]) -> None:
    assert await most_reserved(gateways, 60) > CAPACITY


async def test_gateway_without_a_store_admits_as_if_alone() -> None:
    alone = Gateway("redis://127.0.0.1:1/0", "alone")
    alone.quota.start()
    try:
        assert await most_reserved([alone], 60) > CAPACITY / 2
        assert alone.gate.queue.kv.quota is None
    finally:
        await alone.quota.close()


@pytest.mark.parametrize(("offers", "has"), [(True, 300 + 400 // KEPT_PARTS), (False, 400)])
async def test_part_of_a_quota_is_kept_for_requests_that_come_during_a_turn(offers: bool, has: int) -> None:
    kv = KvBudget()
    kv.resize(CAPACITY, SIZE)
    kv.quota = 400
    kv.reserve(300)
    assert memory_need(kv, 7, offers=offers) == MemoryNeed(CAPACITY, has, 7, 400)
    kv.reserve(500)
    assert memory_need(kv, 7, offers=offers) == MemoryNeed(CAPACITY, 800, 7, 400), "it ran alone"


async def test_small_quota_delays_and_refuses_nothing() -> None:
    """A quota that can grow says nothing of how long a request will wait."""
    queue = AdmissionQueue(100, 1_000_000)
    queue.resize(100, 1, 0.0)
    queue.kv.resize(CAPACITY, SIZE)
    queue.set_quota(0, CAPACITY, 0.0)
    first = queue.enqueue(SIZE, max_tokens=SIZE, now=0.0)
    second = queue.enqueue(SIZE, max_tokens=SIZE, time_left_s=0.1, now=0.0)
    assert first.admitted, "one runs whatever the quota"
    assert not second.admitted
    assert queue.set_quota(4 * SIZE, CAPACITY, 0.0) == [second]
