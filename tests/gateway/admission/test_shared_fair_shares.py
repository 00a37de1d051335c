"""Tenants get their shares over all gateways: in virtual time, and through a real Redis that goes away."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.metrics import new_registry
from gateway.admission import fair_share_lines, shared_fair_shares
from gateway.admission.capacity import Capacity
from gateway.admission.fair_share_lines import OtherLines
from gateway.admission.gate import AdmissionGate
from gateway.admission.queue import REQUEST_OVERHEAD_TOKENS, AdmissionQueue
from gateway.admission.shared_fair_shares import FairShareTable, SharedFairShares
from gateway.admission.ticket import Ticket
from tests.diptych.runtime.conftest import Store
from tests.diptych.runtime.eventually import eventually

STEP_S = 0.05
STEPS_A_TURN = 5
BACKLOG = 30
"""Requests that each tenant keeps waiting or running at each gateway that it comes through."""


class SimulatedGateway:
    """An admission queue whose workers compute some tokens a step, and hold sequences for some steps."""

    def __init__(self, places: int, tokens_a_step: int, stay_steps: int) -> None:
        self.queue = AdmissionQueue(places, 1 << 30, tenants=lambda: 3)
        self.queue.resize(places, 1, 0.0)
        self.others = OtherLines()
        self.served: Counter[str] = Counter()
        self._tokens_a_step, self._stay = tokens_a_step, stay_steps
        self._spare = 0
        self._computing: list[Ticket] = []
        self._decoding: list[tuple[int, Ticket]] = []
        self._live: Counter[str] = Counter()

    def step(self, number: int, tenants: str, rng: random.Random) -> None:
        now = number * STEP_S
        for tenant in tenants:
            while self._live[tenant] < BACKLOG:
                self._live[tenant] += 1
                ticket = self.queue.enqueue(rng.randrange(10, 200), tenant=tenant, now=now)
                self._admitted([ticket] if ticket.admitted else [])
                self._admitted(self.queue.newly_admitted())
        self._spare += self._tokens_a_step
        while self._computing and self._computing[0].tokens <= self._spare:
            ticket = self._computing.pop(0)
            self._spare -= ticket.tokens
            self.served[ticket.tenant] += ticket.tokens
            self._decoding.append((number + self._stay, ticket))
            self._admitted(self.queue.prefilled(ticket, now))
        if not self._computing:
            self._spare = 0
        while self._decoding and self._decoding[0][0] <= number:
            _, ticket = self._decoding.pop(0)
            self._live[ticket.tenant] -= 1
            self._admitted(self.queue.leave(ticket, now, 1))
        self.queue.invariants()

    def exchange(self, lines: dict[str, fair_share_lines.GatewayLine], name: str, now: float) -> None:
        lines[name] = self.queue.served_here.next_line(self.queue.running_of_tenants, now)
        others = {other: line for other, line in lines.items() if other != name}
        reading = self.others.read(others, now)
        self._admitted(self.queue.charge_elsewhere(reading.served, reading.running, now)[1])
        self.queue.invariants()

    def _admitted(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if ticket.take_admitted():
                self._computing.append(ticket)


def served(
    tenants_at: list[str], *, shared: bool, places: int, tokens_a_step: int, stay_steps: int
) -> Mapping[str, int]:
    """Return the tokens that each tenant got over all gateways in 17.5 seconds."""
    rng = random.Random(7)
    gateways = [SimulatedGateway(places, tokens_a_step, stay_steps) for _ in tenants_at]
    lines: dict[str, fair_share_lines.GatewayLine] = {}
    before: Counter[str] = Counter()
    for number in range(500):
        for index, (gateway, tenants) in enumerate(zip(gateways, tenants_at, strict=True)):
            gateway.step(number, tenants, rng)
            if shared and number % STEPS_A_TURN == index % STEPS_A_TURN:
                gateway.exchange(lines, str(index), number * STEP_S)
        if number == 150:
            before = sum((one.served for one in gateways), Counter[str]())
    return sum((one.served for one in gateways), Counter[str]()) - before


PREFILL = {"places": 200, "tokens_a_step": 120, "stay_steps": 1}
PLACES = {"places": 16, "tokens_a_step": 100_000, "stay_steps": 10}


@pytest.mark.parametrize("bound", [PREFILL, PLACES], ids=["by prefill", "by places"])
@pytest.mark.parametrize(
    ("tenants_at", "alone", "most"),
    [
        (["ab", "a"], 2.6, 1.35),  # exactly 3 and 1, but for the floor
        (["ab", "a", "a"], 4.2, 2.6),  # 5, and 2: the tenant has two gateways for itself
        (["ab", "ac"], 1.8, 1.3),  # 2, and 1
        (["ab", "ab"], 0.9, 1.15),
    ],
)
def test_tenant_of_several_gateways_gets_one_share(
    bound: dict[str, int], tenants_at: list[str], alone: float, most: float
) -> None:
    got = served(tenants_at, shared=False, **bound)
    assert got["a"] / got["b"] > alone, "the control: what each gateway does for itself"
    got = served(tenants_at, shared=True, **bound)
    assert 0.85 < got["a"] / got["b"] < most


@pytest.mark.parametrize("bound", [PREFILL, PLACES], ids=["by prefill", "by places"])
def test_sharing_wastes_no_capacity(bound: dict[str, int]) -> None:
    tenants_at = ["abc", "a", "bc"]
    alone = sum(served(tenants_at, shared=False, **bound).values())
    assert sum(served(tenants_at, shared=True, **bound).values()) > 0.98 * alone


@pytest.mark.parametrize("bound", [PREFILL, PLACES], ids=["by prefill", "by places"])
def test_tenant_is_never_shut_out_of_a_gateway(bound: dict[str, int]) -> None:
    """However much it gets elsewhere, what it sends to this gateway goes on."""
    rng = random.Random(3)
    gateway = SimulatedGateway(**bound)
    lines = {"x": fair_share_lines.GatewayLine(0, {})}
    for number in range(400):
        gateway.step(number, "ab", rng)
        if number % STEPS_A_TURN == 0:
            use = fair_share_lines.TenantUse(number * 1_000_000, 10_000)
            lines["x"] = fair_share_lines.GatewayLine(number, {"a": use})
            gateway.exchange(lines, "own", number * STEP_S)
    assert 0.03 < gateway.served["a"] / gateway.served["b"] < 0.25


# --- through Redis ----------------------------------------------------------------------------------------


class Gateway:
    """An admission gate that four requests of 100 tokens fill, and its turns at the table."""

    def __init__(self, url: str, name: str) -> None:
        self.gate = AdmissionGate(AdmissionQueue(8, 1 << 30, tenants=lambda: 2), time.monotonic)
        self.gate.resize(Capacity(8, 1))
        self.metrics = GatewayMetrics(new_registry())
        table = FairShareTable(url, "digest", name)
        self.shares = SharedFairShares(self.gate, table, lambda: 2, self.metrics)
        self.answered: Counter[str] = Counter()

    async def client(self, tenant: str) -> None:
        """Send requests one after the other."""
        while True:
            admitted = asyncio.Event()
            ticket = self.gate.enter(
                100 - REQUEST_OVERHEAD_TOKENS,
                max_tokens=1,
                priority=0,
                tenant=tenant,
                time_left_s=None,
                on_admitted=lambda choices, admitted=admitted: admitted.set(),  # type: ignore[misc]
            )
            await admitted.wait()
            self.gate.prefilled(ticket)
            await asyncio.sleep(0.01)
            self.answered[tenant] += 1
            self.gate.leave(ticket, 1)

    def turns(self, outcome: str) -> float:
        value = self.metrics.fair_share_turns.labels(outcome)._value.get()
        return float(value)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "valkey")
    made.start()
    yield made
    made.kill()


@pytest_asyncio.fixture
async def gateways(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Gateway]]:
    monkeypatch.setattr(shared_fair_shares, "TURN_S", 0.05)
    monkeypatch.setattr(shared_fair_shares, "RESTING_TURN_S", 0.05)
    made = [Gateway(store.url, str(number)) for number in range(2)]
    clients = [asyncio.create_task(made[0].client("b")) for _ in range(16)]
    clients += [asyncio.create_task(one.client("a")) for one in made for _ in range(16)]
    yield made
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    for one in made:
        await one.shares.close()


async def part_of_b(gateway: Gateway, requests: int = 400) -> float:
    """Return b's part of the next requests that a gateway serves."""
    before = Counter(gateway.answered)
    await eventually(lambda: (gateway.answered - before).total() >= requests)
    got = gateway.answered - before
    return got["b"] / got.total()


@pytest.mark.asyncio
async def test_gateways_tell_each_other_and_go_on_alone_without_redis(
    gateways: list[Gateway], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gateways[0]
    assert 0.4 < await part_of_b(first) < 0.6, "the control: nothing is shared yet"
    for one in gateways:
        one.shares.start()
    await eventually(lambda: all(one.turns("answered") > 3 for one in gateways))
    assert await part_of_b(first) > 0.75, "a is served at the other gateway"
    assert first.metrics.fair_share_tokens._value.get() > 0
    monkeypatch.setattr(shared_fair_shares, "LEASE_S", 0.1)
    store.freeze()
    try:
        await eventually(lambda: all(one.turns("lost") > 1 for one in gateways))
        assert 0.4 < await part_of_b(first) < 0.6
    finally:
        store.thaw()
    back = first.turns("answered")
    await eventually(lambda: first.turns("answered") > back + 6)
    assert await part_of_b(first) > 0.75


@pytest.mark.asyncio
async def test_gateway_that_ends_takes_its_line_along(store: Store) -> None:
    one, other = (FairShareTable(store.url, "digest", name) for name in ("one", "other"))
    line = fair_share_lines.GatewayLine(1, {"a": fair_share_lines.TenantUse(5, 1)})
    assert await one.exchange(line) == {}
    assert await other.exchange(line) == {"one": line}
    await one.remove()
    assert await other.exchange(line) == {}
    for table in (one, other):
        await table.close()
