"""Links to real servers and real processes: identity, loss detection and its delay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from gateway.model.served_model import ServedModel
from gateway.worker_pool.codec import DecodeCodec, Load, WorkerEvent
from gateway.worker_pool.links import Link, LinkDown, LinkTiming
from tests.gateway.running_gateway import DIGEST, collect, reason_of, running, until
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

ROOT = Path(__file__).parents[3]


class Journal:
    """A listener that records all calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_up(self, worker_id: str) -> None:
        self.calls.append("up")

    def on_down(self, worker_id: str) -> None:
        self.calls.append("down")

    def on_load(self, worker_id: str, load: Load) -> None:
        self.calls.append("load")

    def on_events(self, worker_id: str, events: list[WorkerEvent]) -> None:
        self.calls.append("events")


def link_to(worker: ScriptedDecode, journal: Journal, *, incarnation: int | None = None) -> Link:
    return Link(
        DecodeCodec("gateway", 1),
        journal,
        worker_id=worker.worker_id,
        incarnation=incarnation or worker.incarnation,
        address=worker.address,
        timing=LinkTiming(retry_s=0.05),
    )


async def test_silent_worker_is_lost_and_linked_again(redis_url: str) -> None:
    worker, journal = ScriptedDecode(), Journal()
    await worker.start(redis_url, DIGEST)
    link = link_to(worker, journal)
    with pytest.raises(LinkDown):
        link.send(link.codec.build_heartbeat(0))
    link.start()
    await until(lambda: "load" in journal.calls)
    assert journal.calls[0] == "up"
    assert (await worker.wait_for("hello"))[0].gateway_id == "gateway"
    worker.silent = True
    started = time.monotonic()
    await until(lambda: journal.calls[-1] == "down")
    assert 1.5 < time.monotonic() - started < 10
    worker.silent = False
    await until(lambda: journal.calls.count("up") == 2)
    await link.close()
    assert journal.calls.count("down") == 2
    await worker.close()


async def test_worker_with_a_stuck_engine_is_lost_until_its_step_ends(redis_url: str) -> None:
    worker, journal = ScriptedDecode(), Journal()
    await worker.start(redis_url, DIGEST)
    link = link_to(worker, journal)
    link.start()
    await until(lambda: "load" in journal.calls)
    worker.stuck = True
    await until(lambda: journal.calls[-1] == "down")
    hellos = len(await worker.wait_for("hello"))
    await worker.wait_for("hello", hellos + 2)  # reconnected twice, and refused
    assert not link.up
    worker.stuck = False
    await until(lambda: link.up)
    await link.close()
    await worker.close()


async def test_other_incarnation_at_the_address_is_refused(redis_url: str) -> None:
    worker, journal = ScriptedDecode(), Journal()
    await worker.start(redis_url, DIGEST)
    link = link_to(worker, journal, incarnation=worker.incarnation + 1)
    link.start()
    await worker.wait_for("hello", 3)
    assert journal.calls == []
    assert not link.up
    await link.close()
    await worker.close()


async def test_restarted_worker_is_linked_again(bundled: ServedModel, redis_url: str) -> None:
    decode = ScriptedDecode()
    async with running(bundled, redis_url, ScriptedPrefill(), decode) as stack:
        await decode.kill()
        await stack.until_ready(False)
        again = ScriptedDecode(answering([1, 2]))
        again.worker_id = decode.worker_id
        assert decode.publisher is not None
        await decode.publisher.close()
        await again.start(redis_url, DIGEST)
        await stack.until_ready()
        assert (await collect(stack.stub.StreamGenerate(stack.request())))[-1].usage.completion_tokens == 2
        await again.close()


async def test_workers_of_another_model_are_not_linked(bundled: ServedModel, redis_url: str) -> None:
    other = ScriptedDecode()
    await other.start(redis_url, "e" * 64)
    async with running(bundled, redis_url, ScriptedPrefill()) as stack:
        await until(lambda: len(stack.gateway.mirror.workers()) >= 2)
        await until(lambda: len(stack.core.worker_pool.registry.linked()) == 1)
        await asyncio.sleep(0.5)
        assert other.links == 0
        assert not stack.gateway.ready
    await other.close()


@contextlib.asynccontextmanager
async def worker_process(redis_url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.gateway.scripted_workers", redis_url, DIGEST),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"started\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGSTOP, 10.0), (signal.SIGKILL, 1.5)])
async def test_stopped_or_killed_process_is_lost_within_seconds(
    bundled: ServedModel, redis_url: str, how: signal.Signals, within_s: float
) -> None:
    async with (
        worker_process(redis_url) as process,
        running(bundled, redis_url, worker_wait_timeout=0) as stack,
    ):
        await stack.until_ready()
        call = stack.stub.StreamGenerate(stack.request())
        await until(lambda: any(w.outstanding for w in stack.core.worker_pool.registry.linked()))
        await asyncio.sleep(0.2)
        os.kill(process.pid, how)
        started = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert time.monotonic() - started < within_s
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(caught.value) == "NO_READY_WORKER"  # no other worker could take it
        await stack.until_idle()
