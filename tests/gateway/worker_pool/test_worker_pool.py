"""What the pool reports of workers that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence

import pytest

from diptych.runtime.discovery.records import WorkerRecord
from gateway.attempt.types import Role
from gateway.attempt.work import Job, TraceParent
from gateway.worker_pool.codec import WorkerEvent
from gateway.worker_pool.router import NoProof, NoWorker, RouteRequest
from gateway.worker_pool.worker_pool import GatewayIdentity, WorkerPool
from tests.gateway.attempt.test_work import REQUEST
from tests.gateway.running_gateway import DIGEST, until
from tests.gateway.scripted_workers import ScriptedDecode


class Journal:
    """A listener that records all reports."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def on_events(self, events: Sequence[WorkerEvent]) -> None: ...

    def on_worker_down(self, worker_id: str, graceful: bool) -> None:
        self.calls.append(("down", graceful))

    def on_worker_up(self, worker_id: str, same_process: bool) -> None:
        self.calls.append(("up", same_process))


class ListedWorkers:
    """A directory that lists what a test puts there."""

    connected = True

    def __init__(self) -> None:
        self.records: list[WorkerRecord] = []

    def workers(self) -> list[WorkerRecord]:
        return self.records

    def prefix_hits(self, *args: object) -> dict[str, int]:
        return {}


@contextlib.asynccontextmanager
async def linked(redis_url: str) -> AsyncIterator[tuple[WorkerPool, ListedWorkers, Journal, ScriptedDecode]]:
    """Yield a pool with one worker, which is linked."""
    worker, journal, directory = ScriptedDecode(), Journal(), ListedWorkers()
    await worker.start(redis_url, DIGEST)
    assert worker.publisher is not None
    directory.records = [worker.publisher.record]
    clock = asyncio.get_running_loop().time
    pool = WorkerPool(directory, journal, GatewayIdentity("gateway", 1, DIGEST, b"secret"), clock=clock)
    pool.reconcile()
    await until(lambda: journal.calls == [("up", False)])
    yield pool, directory, journal, worker
    await pool.close()
    await worker.close()


@pytest.mark.parametrize("leaving", [True, False])
async def test_a_replaced_worker_is_reported_once_and_as_it_left(leaving: bool, redis_url: str) -> None:
    async with linked(redis_url) as (pool, directory, journal, worker):
        pool.registry.require(worker.worker_id).leaving = leaving
        [record] = directory.records
        directory.records = [dataclasses.replace(record, incarnation=record.incarnation + 1)]
        pool.reconcile()
        assert journal.calls == [("up", False), ("down", leaving)]
        assert not pool.registry.is_linked(worker.worker_id)
        await asyncio.sleep(0.1)
        assert journal.calls == [("up", False), ("down", leaving)]


async def test_no_attempt_is_placed_while_nothing_was_heard_of_its_suspects(redis_url: str) -> None:
    async with linked(redis_url) as (pool, _, _, worker):
        now = asyncio.get_running_loop().time()
        job = Job(
            "r~1", dataclasses.replace(REQUEST, prompt_ids=(1, 2, 3, 4)), 4, (), None, TraceParent("", "")
        )

        def place(*suspects: str) -> object:
            request = RouteRequest("a", 4, 8, suspects=tuple((name, now) for name in suspects))
            return pool.place_attempt(request, job, (1, 2, 3, 4))

        no_prefill_worker = NoWorker(Role.PREFILL)
        assert place() == no_prefill_worker
        assert place(worker.worker_id) == NoProof()
        assert place("a worker that is gone") == no_prefill_worker, "its death is counted"
        await until(lambda: place(worker.worker_id) == no_prefill_worker)  # after its next heartbeat


async def test_closing_reports_each_linked_worker_once(redis_url: str) -> None:
    async with linked(redis_url) as (_, _, journal, _):
        pass
    assert journal.calls == [("up", False), ("down", False)]
