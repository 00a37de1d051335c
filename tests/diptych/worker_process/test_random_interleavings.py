"""Attach, dispatch, cancel, abort, deadline, broken links, in random order over random times, on real loops.

Whatever happens, no request hangs, what finishes has the right tokens, and nothing is left over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from diptych.worker.v1 import work_pb2
from tests.diptych.worker_process.both_workers import VOCABULARY, Decode, House, Prefill, greedy, house
from tests.diptych.worker_process.complaints import complaints
from tests.diptych.worker_process.scripted_gateway import Gateway, work

REQUESTS = 200
AT_ONCE = 12
TOO_MANY_NEW = "decode FAILURE_REASON_TOO_MANY_NEW"
PROMPTS = [tuple(random.Random(n).randrange(VOCABULARY) for _ in range(1 + n % 30)) for n in range(17)]


@dataclass
class Plan:
    """The events of one request."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    fate: str
    patience_s: float
    late_s: float


def plan(number: int, rng: random.Random) -> Plan:
    fate = rng.choices(["finish", "cancel", "deadline", "leave early"], weights=[5, 3, 1, 1])[0]
    prompt = rng.choice(PROMPTS)
    if rng.random() < 0.5:
        prompt = (*prompt, *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))))
    return Plan(f"r{number}", prompt, rng.randint(1, 24), fate, rng.expovariate(50), rng.expovariate(500))


class Walk:
    """200 requests over all workers of a house."""

    requests: int | None = None

    def __init__(self, made: House, seed: int, local: float = 0.4) -> None:
        """Have decode workers compute a share `local` of the prompts themselves."""
        self.local = local
        self.rng = random.Random(seed)
        self.house = made
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        gateways = [Gateway(self.house), Gateway(self.house)]

        async def one(number: int) -> None:
            async with gate:
                await self.request(plan(number, self.rng), gateways)

        trouble = asyncio.create_task(self.trouble(gateways))
        async with asyncio.timeout(250):
            await asyncio.gather(*(one(number) for number in range(self.requests or REQUESTS)))
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
        await self.preempt_one(gateways[0])
        for gateway in gateways:
            await gateway.close()

    async def preempt_one(self, gateway: Gateway) -> None:
        """Preempt a request between two of its tokens: whether blocks run out depends on the machine."""
        decode, prefill = self.house.decodes[0], self.house.prefills[0]
        planned = Plan("preempted", PROMPTS[3], 24, "finish", 0.0, 0.0)
        for attempt in range(1, 30):
            key = planned.name, attempt
            heard = gateway.start(decode, prefill, self.work(key, planned.prompt, planned.max_tokens))
            for _ in range(1_000_000):
                if heard.tokens or heard.ended.is_set():
                    break
                await asyncio.sleep(0)
            decode.loop.requests.preempt_request(key)
            await heard.ended.wait()
            await self.settle(key, planned, decode, prefill)
            self.outcomes[word := heard.terminal_messages[0]] += 1
            if word == "decode preempted":
                break
        delivered = tuple(heard.tokens)
        assert 0 < len(delivered) < planned.max_tokens
        key = planned.name, attempt + 1
        message = self.work(key, planned.prompt, planned.max_tokens, delivered=delivered)
        again = gateway.start(decode, prefill, message)
        await again.ended.wait()
        assert again.terminal_messages[0] == "decode finished"
        assert delivered + tuple(again.tokens) == self.expected(planned)

    async def trouble(self, gateways: list[Gateway]) -> None:
        """Take grants back, break links, lose a gateway: what the world does to workers now and then."""
        while True:
            await asyncio.sleep(self.rng.expovariate(15))
            match self.rng.choice(["abort", "abort", "break", "gateway", "forget"]):
                case "forget":
                    self.forget()
                case "abort":
                    loop = self.rng.choice(self.house.decodes).loop
                    if key := loop.requests.grants.abort_newest_grant():
                        loop.requests.preempt_request(key)
                case "break":
                    links = list(self.rng.choice(self.house.prefills).client._links.values())
                    if links:
                        self.rng.choice(links)[0].close()
                case "gateway" if self.rng.random() < 0.3:
                    number = self.rng.randrange(len(gateways))
                    lost, gateways[number] = gateways[number], Gateway(self.house)
                    await lost.close()
                    for heard in lost.heard.values():
                        heard.end_all("gateway lost")

    def forget(self) -> None:
        """Flush the prefix cache of a worker, or let a decode worker distrust a part of it."""
        decode = self.rng.choice(self.house.decodes)
        match self.rng.choice(["decode", "prefill", "distrust"]):
            case "decode":
                decode.loop.flush_prefix_cache()
            case "prefill":
                self.rng.choice(self.house.prefills).loop.flush_prefix_cache()
            case "distrust":
                decode.pool.forget(decode.pool.cached_keys()[:1])

    async def request(self, planned: Plan, gateways: list[Gateway]) -> None:
        """Act as a gateway: a preempted request comes back with its tokens, others have ended."""
        gateway = self.rng.choice(gateways)
        delivered: tuple[int, ...] = ()
        for attempt in range(1, 30):
            if gateway.lost:  # with it went the request
                return
            decode, prefill = self.rng.choice(self.house.decodes), self.rng.choice(self.house.prefills)
            message = self.work(
                (planned.name, attempt),
                planned.prompt,
                planned.max_tokens,
                delivered=delivered,
                reserve=attempt > 2,
                seconds=planned.patience_s if planned.fate == "deadline" else None,
                cache_read=self.rng.random() < 0.8,
                cache_write=self.rng.random() < 0.8,
            )
            local = self.rng.random() < self.local
            if local:
                kinds = work_pb2.LOCAL_PREFILL_SHORT, work_pb2.LOCAL_PREFILL_FALLBACK
                message.local_prefill = self.rng.choice(kinds)
                heard = gateway.start_local(decode, message)
            else:
                heard = gateway.start(decode, prefill, message)
            cancelling = planned.fate in ("cancel", "leave early")
            try:
                async with asyncio.timeout(planned.patience_s if cancelling else None):
                    await heard.ended.wait()
            except TimeoutError:
                await self.cancel((planned.name, attempt), planned, decode, prefill)
                self.outcomes["cancelled"] += 1
                return
            await self.settle((planned.name, attempt), planned, decode, prefill)
            delivered += tuple(heard.tokens)
            assert delivered == self.expected(planned)[: len(delivered)]
            word = heard.terminal_messages[0]
            self.outcomes[word] += 1
            if word == "decode finished":
                assert len(delivered) == planned.max_tokens
            if word not in ("decode preempted", TOO_MANY_NEW):
                return
        raise AssertionError(f"{planned.name} was preempted again and again")

    def work(self, key: tuple[str, int], *arguments: Any, **changes: Any) -> work_pb2.Work:
        """Return the message of an attempt."""
        return work(key, *arguments, **changes)

    def expected(self, planned: Plan) -> tuple[int, ...]:
        """Return the output of a request that finishes."""
        return greedy(planned.prompt, planned.max_tokens)

    async def cancel(self, key: tuple[str, int], planned: Plan, decode: Decode, prefill: Prefill) -> None:
        first, second = self.rng.sample([decode.loop.requests.cancel, prefill.loop.requests.cancel], 2)
        first(key)
        await asyncio.sleep(planned.late_s)
        second(key)

    async def settle(self, key: tuple[str, int], planned: Plan, decode: Decode, prefill: Prefill) -> None:
        """Cancel the attempt on the other worker after a terminal message."""
        await self.cancel(key, planned, decode, prefill)


@pytest.mark.parametrize(
    ("transport", "seed", "blocks"),
    [
        ("shared_memory", 1, 24),
        ("tcp", 2, 20),
        pytest.param("shared_memory", 2, 20, marks=pytest.mark.full),
        pytest.param("tcp", 1, 24, marks=pytest.mark.full),
    ],
)
async def test_200_requests_leave_nothing_behind(
    transport: str, seed: int, blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with house(transport, decodes=2, prefills=2, blocks=blocks) as made:
        walk = Walk(made, seed)
        await walk.run()
        assert await made.empty() == []
        for prefill in made.prefills:
            for peer in prefill.client._peers.values():
                assert peer._sender.held_grants() == []
                assert not peer._push_states
                assert not peer._pending_asks
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 20, walk.outcomes  # two in five on a quiet machine
    assert walk.outcomes["cancelled"] > 10, walk.outcomes
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes
    assert walk.outcomes[TOO_MANY_NEW] > 5, walk.outcomes
