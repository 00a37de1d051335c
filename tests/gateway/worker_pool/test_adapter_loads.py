"""What a gateway believes of the adapters in its workers' memory, from orders, answers and heartbeats."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.adapters.adapter import Adapter
from gateway.worker_pool.adapter_loads import NO_ADAPTERS, RETRY_S, AdapterLoads
from gateway.worker_pool.codec import AdapterAnswer, Load, PrefillCodec
from gateway.worker_pool.registry import Worker, WorkerRegistry
from tests.gateway.worker_pool.test_registry import worker as idle_worker

A, B = Adapter("a", b"A" * 32, "/a"), Adapter("b", b"B" * 32, "/b")


class World:
    """One linked worker that answers when told to; ``now`` is the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.needed = {A.digest: A}
        self.sent: list[Any] = []
        self.worker: Worker = idle_worker()
        codec = PrefillCodec("gateway", 1)
        link = SimpleNamespace(up=True, codec=codec, send=self.sent.append)
        self.worker.link = link  # type: ignore[assignment]
        self.registry = WorkerRegistry()
        self.registry.add(self.worker)
        self.loads = AdapterLoads(self.registry, lambda: self.needed, lambda: self.now)

    def orders(self) -> list[tuple[str, bytes]]:
        """Return what was sent since the last call, as (kind, digest)."""
        found = [(m.WhichOneof("message"), getattr(m, m.WhichOneof("message")).digest) for m in self.sent]
        self.last_number = getattr(self.sent[-1], self.sent[-1].WhichOneof("message")).id if self.sent else 0
        self.sent.clear()
        return found

    def answer(self, failure: str = "") -> None:
        self.loads.on_answer("w", AdapterAnswer(self.last_number, failure))

    def beat(self, *digests: bytes, max_loras: int = 8) -> None:
        self.worker.on_load(Load(adapters=digests, max_loras=max_loras))
        self.loads.on_load(self.worker)

    def has(self, adapter: Adapter = A) -> bool:
        return self.loads.holders([self.worker], adapter.digest) == [self.worker]

    def may_come(self, adapter: Adapter = A) -> bool:
        return self.loads.may_come([self.worker], adapter.digest)


@pytest.fixture
async def world() -> World:
    return World()


async def test_needed_adapters_are_asked_for_once(world: World) -> None:
    world.loads.reconcile()
    world.loads.reconcile()
    assert world.orders() == [("load_adapter", A.digest)]
    assert (world.has(), world.may_come()) == (False, True)
    world.answer()
    assert (world.has(), world.may_come()) == (True, False)
    world.beat()  # was written before the answer
    assert world.has()
    world.beat(A.digest)
    world.loads.reconcile()
    assert world.orders() == []
    world.beat()
    assert not world.has()
    world.loads.reconcile()
    assert world.orders() == [("load_adapter", A.digest)]


async def test_a_refused_load_is_tried_again_later(world: World) -> None:
    world.loads.reconcile()
    world.orders()
    world.answer("no file")
    assert (world.has(), world.may_come()) == (False, False)
    assert world.loads.refusals(A.digest) == ["w: no file"]
    world.loads.reconcile()
    assert world.orders() == []
    world.now += RETRY_S
    world.loads.reconcile()
    assert world.orders() == [("load_adapter", A.digest)]
    assert not world.may_come()  # a request does not wait for what failed a moment ago
    world.answer()
    assert world.has()
    assert world.loads.refusals(A.digest) == []


async def test_a_dropped_adapter_is_unloaded_when_nothing_needs_it(world: World) -> None:
    world.beat(A.digest, B.digest)
    world.loads.drop(A.digest)
    world.loads.reconcile()
    assert world.orders() == []  # a request still has it; B is another gateway's
    world.needed = {}
    world.loads.reconcile()
    world.loads.reconcile()
    assert world.orders() == [("unload_adapter", A.digest)]
    assert not world.has()
    world.beat(A.digest, B.digest)  # an attempt still runs there
    assert not world.has()
    world.answer()
    world.beat(B.digest)
    world.loads.reconcile()
    assert world.orders() == []


async def test_unload_waits_for_an_unload_that_is_on_its_way(world: World) -> None:
    world.beat(A.digest)
    world.needed = {}
    world.loads.drop(A.digest)
    world.loads.reconcile()
    assert world.orders() == [("unload_adapter", A.digest)]
    waiting = asyncio.ensure_future(world.loads.unload_all(A.digest))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    assert world.orders() == []
    world.last_number = 1
    world.answer()
    await asyncio.wait_for(waiting, 1)


async def test_a_worker_without_adapters_refuses_at_once(world: World) -> None:
    world.loads.reconcile()
    world.orders()
    world.beat(max_loras=0)  # it may be too old to answer
    assert not world.may_come()
    assert await world.loads.load(world.worker, B) == NO_ADAPTERS
    assert world.orders() == []


async def test_a_lost_worker_has_refused_nothing(world: World) -> None:
    answer = world.loads.load(world.worker, A)
    world.loads.on_down("w")
    assert await answer == ""
    assert (world.has(), world.may_come()) == (False, True)
    world.loads.on_answer("w", AdapterAnswer(1, ""))  # of the link before
    assert not world.has()


async def test_a_refused_attempt_voids_what_was_believed(world: World) -> None:
    world.beat(A.digest)
    world.loads.on_not_loaded("w")
    assert (world.has(), world.may_come()) == (False, True)
    world.beat(A.digest)
    assert world.has()


def test_an_answer_without_words_is_a_failure_all_the_same() -> None:
    codec = PrefillCodec("gateway", 1)
    from diptych.worker.v1 import prefill_pb2, work_pb2

    def parsed(**answer: Any) -> Any:
        message = work_pb2.AdapterAnswer(id=3, **answer)
        return codec.parse(prefill_pb2.PrefillServiceLinkResponse(adapter_answer=message))

    assert parsed() == AdapterAnswer(3, "")
    assert parsed(failure=work_pb2.Failure()).failure
    assert parsed(failure=work_pb2.Failure(message="words")).failure == "words"
    assert replace(Load(), max_loras=3).max_loras == 3
