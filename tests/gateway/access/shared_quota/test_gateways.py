"""Two real gateways, one directory, one key: its quota counts once, and requests do not wait for Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from diptych.runtime.discovery import store as discovery_store
from gateway.access.quota import Quota, QuotaUsage
from gateway.access.shared_quota import leases, pool, slices
from gateway.access.shared_quota import store as pool_store
from gateway.access.shared_quota.leases import QuotaLeases
from gateway.access.shared_quota.store import TURNS_AT_ONCE, PoolStore
from gateway.model.served_model import ServedModel
from tests.diptych.runtime.conftest import Store, store
from tests.gateway.access.keys import Keys, bearer
from tests.gateway.running_gateway import Stack, reason_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

__all__ = ["store"]
OUTPUT = [10, 11, 12]
KEY = "diptych:key-quota:acme-0:1200:-:-"


@dataclass
class Pair:
    """Two gateways over the same workers, and their store."""

    gateways: tuple[Stack, Stack]
    store: Store

    async def ask(self, number: int, key: str, **fields: Any) -> str:
        """Send a request to a gateway; return OK, or why it was refused."""
        stack = self.gateways[number]
        try:
            await stack.stub.Generate(stack.request(**fields), metadata=bearer(key))
        except grpc.aio.AioRpcError as error:
            return reason_of(error)
        return "OK"

    async def ask_all(self, numbers: str, key: str) -> list[str]:
        return [await self.ask(int(number), key) for number in numbers]

    def turns(self, outcome: str) -> float:
        """Return how many turns at pools ended so, at both."""
        name, labels = "diptych_key_quota_turns_total", {"outcome": outcome}
        return sum(stack.registry.get_sample_value(name, labels) or 0.0 for stack in self.gateways)

    def tokens(self) -> Counter[tuple[str, str]]:
        """Return the counters by tenant and kind, of both."""
        counted: Counter[tuple[str, str]] = Counter()
        for stack in self.gateways:
            for family in stack.registry.collect():
                for sample in family.samples:
                    if sample.name == "diptych_tenant_tokens_total":
                        counted[sample.labels["tenant"], sample.labels["kind"]] += int(sample.value)
        return counted


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.jsonl")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for Redis as long as a busy machine takes, and quotas not fill meanwhile."""
    monkeypatch.setattr(leases, "WAIT_S", 60.0)
    for name in ("_CONNECT_S", "_TIMEOUT_S"):
        monkeypatch.setattr(discovery_store, name, 60.0)
    for module in (pool, slices):
        monkeypatch.setattr(module, "MINUTE_S", 60_000.0)


@contextlib.asynccontextmanager
async def pair(
    bundled: ServedModel, store: Store, keys: Keys, decode: ScriptedDecode | None = None, **settings: Any
) -> AsyncIterator[Pair]:
    workers = (ScriptedPrefill(), decode or ScriptedDecode(answering(OUTPUT)))
    settings = {"api_keys_file": keys.path, **settings}
    async with (
        running(bundled, store.url, *workers, worker_id="first", **settings) as first,
        running(bundled, store.url, worker_id="second", **settings) as second,
    ):
        await second.until_ready()
        made = Pair((first, second), store)
        views = [stack.gateway._quotas.view for stack in made.gateways]
        await until(lambda: all(view.gateways == 2 and view.answers for view in views))
        yield made


@pytest.mark.usefixtures("patient")
async def test_three_a_minute_pass_at_one_gateway_and_split_over_both(
    bundled: ServedModel, store: Store, keys: Keys
) -> None:
    splits = {split: keys.add("acme", requests_per_minute=3) for split in ("000", "010", "011", "001")}
    async with pair(bundled, store, keys) as both:
        for split, key in splits.items():
            assert await both.ask_all(split, key) == ["OK"] * 3
            assert await both.ask_all("01", key) == ["QUOTA_EXCEEDED"] * 2
        crowd = keys.add("acme", requests_per_minute=3)
        await asyncio.sleep(1.1)  # the file is read again
        answers = await asyncio.gather(*(both.ask(number % 2, crowd) for number in range(8)))
        assert Counter(answers) == {"OK": 3, "QUOTA_EXCEEDED": 5}


@pytest.mark.usefixtures("patient")
async def test_control_gateways_that_count_alone_let_six_pass(
    bundled: ServedModel, store: Store, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuotaLeases, "usage", lambda leases, name, quota: QuotaUsage(name, quota))
    key = keys.add("acme", requests_per_minute=3)
    async with pair(bundled, store, keys) as both:
        assert Counter(await both.ask_all("01010101", key)) == {"OK": 6, "QUOTA_EXCEEDED": 2}


@pytest.mark.usefixtures("patient")
async def test_places_and_tokens_are_shared(bundled: ServedModel, store: Store, keys: Keys) -> None:
    places, tokens = keys.add("acme", concurrent_requests=2), keys.add("acme", tokens_per_minute=7)
    async with pair(bundled, store, keys, ScriptedDecode()) as both:
        first, second = both.gateways
        streams = [
            stack.stub.StreamGenerate(stack.request(), metadata=bearer(places)) for stack in both.gateways
        ]
        await until(lambda: first.core.gate.queue.running + second.core.gate.queue.running == 2)
        assert await both.ask_all("01", places) == ["QUOTA_EXCEEDED"] * 2
        streams[0].cancel()
        await first.until_idle()
        await until(lambda: first.gateway._quotas.active == set())
        again = second.stub.StreamGenerate(second.request(), metadata=bearer(places))
        await until(lambda: second.core.gate.queue.running == 2)
        for stream in (streams[1], again):
            stream.cancel()
        await second.until_idle()
    async with pair(bundled, store, keys) as both:
        assert await both.ask_all("01", tokens) == ["OK", "OK"], "a prompt of one token and three of output"
        assert await both.ask_all("01", tokens) == ["QUOTA_EXCEEDED"] * 2


@pytest.mark.usefixtures("patient")
async def test_what_a_gateway_leaves_is_there_for_the_other(
    bundled: ServedModel, store: Store, keys: Keys
) -> None:
    """Of twenty a second one gateway holds some; when it ends, the other one has them at once."""
    key = keys.add("acme", requests_per_minute=1200)
    async with pair(bundled, store, keys) as both:
        assert await both.ask_all("0000", key) == ["OK"] * 4
        await both.gateways[0].gateway._quotas.close()
        level = store.client().hget(KEY, "requests")
        assert float(level.split()[0]) == pytest.approx(1196, abs=0.5)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("gone", ["frozen", "killed"])
async def test_without_redis_the_last_leases_hold_and_one_request_waits(
    bundled: ServedModel, store: Store, keys: Keys, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve a minute: each gateway uses two, and has a half of the other eight when Redis is away."""
    used, fresh = keys.add("acme", requests_per_minute=12), keys.add("acme", requests_per_minute=6)
    async with pair(bundled, store, keys) as both:
        assert await both.ask_all("0011", used) == ["OK"] * 4
        monkeypatch.setattr(leases, "WAIT_S", 0.05)
        store.freeze() if gone == "frozen" else store.kill()
        try:
            for key, passed in ((used, range(7, 10)), (fresh, range(6, 8))):
                answers = Counter(await both.ask_all("01" * 12, key))
                assert answers["OK"] in passed
                assert answers["OK"] + answers["QUOTA_EXCEEDED"] == 24
            assert both.turns("late") <= 2, "of 48 requests one waited at each gateway"
        finally:
            if gone == "frozen":
                store.thaw()


async def test_counters_of_both_add_up_to_the_access_log(
    bundled: ServedModel, store: Store, keys: Keys, tmp_path: Path
) -> None:
    log = tmp_path / "access.jsonl"
    mine, other = keys.add("acme", requests_per_minute=4), keys.add("other")
    async with pair(bundled, store, keys, access_log=str(log)) as both:
        await both.ask_all("010101", mine)
        await both.ask_all("0110", other)
        for stack in both.gateways:
            await stack.until_idle()
        counted = both.tokens()
    logged: Counter[tuple[str, str]] = Counter()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        for kind in ("input", "cached", "output"):
            logged[line["tenant"], kind] += line[f"{kind}_tokens"]
    assert logged == counted
    assert len(lines) == 10
    assert counted["other", "output"] == 4 * len(OUTPUT)
    assert {line["gateway"] for line in lines} == {"first", "second"}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("at_once", [TURNS_AT_ONCE, 1000])
async def test_more_keys_than_connections_lose_no_turn(
    store: Store, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without a bound on turns the client's pool has too few connections, and turns are lost."""
    monkeypatch.setattr(pool_store, "TURNS_AT_ONCE", at_once)
    monkeypatch.setattr(leases, "RENEWED_AT_ONCE", at_once)
    registry = CollectorRegistry()
    quotas = QuotaLeases(PoolStore(store.url, "first"), registry)
    usages = [quotas.usage(f"key-{number}", Quota(requests_per_minute=60)) for number in range(110)]
    await asyncio.gather(*(usage.prepare(1, 0) for usage in usages))
    for usage in usages:
        usage.take(1, 0)
    await quotas._renew_all()
    lost = registry.get_sample_value("diptych_key_quota_turns_total", {"outcome": "lost"})
    await quotas.close()
    assert (lost == 0) is (at_once == TURNS_AT_ONCE)


async def test_keys_without_limits_ask_no_pool(bundled: ServedModel, store: Store, keys: Keys) -> None:
    key = keys.add("acme")
    async with pair(bundled, store, keys) as both:
        assert await both.ask_all("0101", key) == ["OK"] * 4
        assert both.turns("answered") == 0
