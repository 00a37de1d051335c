"""Tokenizer pool: long texts beside the event loop and beside other tenants' texts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest

from diptych.runtime.errors import Draining, QueueFull
from diptych.v1 import inference_pb2 as pb
from gateway.access.access import DEFAULT_TENANT
from gateway.limits import INLINE_PARSE_BYTES
from gateway.model.served_model import ServedModel
from gateway.tokenizer_pool import MAX_WAITING, THREADS, TokenizerPool
from tests.gateway.running_gateway import running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

SHORT = pb.TokenizeRequest(text="a")
LONG = pb.TokenizeRequest(text="a" * INLINE_PARSE_BYTES)


@pytest.fixture
async def texts() -> AsyncIterator[TokenizerPool]:
    made = TokenizerPool()
    yield made
    made.close()


class Held:
    """Work that lasts until it is let go."""

    def __init__(self) -> None:
        self.begun, self._go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        self._go.wait(60)
        return "done"

    def let_go(self) -> None:
        self._go.set()


async def begun(held: Held) -> bool:
    return await asyncio.to_thread(held.begun.wait, 60)


async def idle(turns: int = 50) -> None:
    for _ in range(turns):
        await asyncio.sleep(0.001)


async def test_pool_runs_short_texts_inline_and_long_ones_in_a_thread(texts: TokenizerPool) -> None:
    here = threading.get_ident()
    assert await texts.run(SHORT, "a", threading.get_ident) == here
    assert await texts.run(LONG, "a", threading.get_ident) != here


async def test_pool_runs_one_long_text_per_tenant_at_a_time(texts: TokenizerPool) -> None:
    works = [Held() for _ in range(THREADS + 2)]
    greedy = [asyncio.create_task(texts.run(LONG, "greedy", work)) for work in works]
    assert await begun(works[0])
    async with asyncio.timeout(60):
        assert await texts.run(LONG, "modest", lambda: "read") == "read"
    assert [work.begun.is_set() for work in works] == [True] + [False] * (THREADS + 1)
    for work in works:
        work.let_go()
    assert await asyncio.gather(*greedy) == ["done"] * len(works)


async def test_cancelled_caller_keeps_its_turn_until_the_work_is_done(texts: TokenizerPool) -> None:
    """Cancel the caller: without this rule repeated cancels would start any number of texts."""
    first, second = Held(), Held()
    leaving = asyncio.create_task(texts.run(LONG, "a", first))
    assert await begun(first)
    leaving.cancel()
    staying = asyncio.create_task(texts.run(LONG, "a", second))
    await idle()
    assert not second.begun.is_set()
    first.let_go()
    assert await begun(second)
    second.let_go()
    assert await staying == "done"


async def test_caller_cancelled_while_waiting_does_not_block_others(texts: TokenizerPool) -> None:
    first, last = Held(), Held()
    reading = asyncio.create_task(texts.run(LONG, "a", first))
    assert await begun(first)
    waiting = asyncio.create_task(texts.run(LONG, "a", Held()))
    await idle(5)
    waiting.cancel()
    first.let_go()
    last.let_go()
    assert await reading == "done"
    async with asyncio.timeout(60):
        assert await texts.run(LONG, "a", last) == "done"


async def test_failed_work_raises_and_ends_the_turn(texts: TokenizerPool) -> None:
    def fails() -> str:
        raise ValueError("no")

    again: list[Callable[[], str]] = [fails, fails]
    for work in again:
        with pytest.raises(ValueError, match="no"):
            await texts.run(LONG, "a", work)


async def test_deadline_bounds_the_wait_for_a_turn(bundled: ServedModel, redis_url: str) -> None:
    held = Held()
    async with running(bundled, redis_url, ScriptedPrefill(), ScriptedDecode(answering([10]))) as stack:
        before_it = asyncio.create_task(stack.gateway.tokenizer_pool.run(LONG, DEFAULT_TENANT, held))
        assert await begun(held)
        body = {"model": bundled.card.name, "prompt": "a " * INLINE_PARSE_BYTES}
        url = f"http://127.0.0.1:{stack.gateway.http_port}/v1/completions"
        headers = {"x-request-timeout-ms": "100"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers) as answer,
        ):
            assert (answer.status, (await answer.json())["error"]["code"]) == (504, "deadline_exceeded")
        assert not before_it.done()
        held.let_go()
        await before_it


async def test_pool_refuses_above_max_waiting_per_tenant(texts: TokenizerPool) -> None:
    held = Held()
    first = asyncio.create_task(texts.run(LONG, "a", held))
    assert await begun(held)
    waiting = [asyncio.create_task(texts.run(LONG, "a", threading.get_ident)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await texts.run(LONG, "a", threading.get_ident)
    assert await texts.run(LONG, "b", threading.get_ident)
    held.let_go()
    await asyncio.gather(first, *waiting)


async def test_closed_pool_raises_draining_in_waiting_calls() -> None:
    texts, held = TokenizerPool(), Held()
    first = asyncio.create_task(texts.run(LONG, "a", held))
    assert await begun(held)
    waiting = asyncio.create_task(texts.run(LONG, "a", threading.get_ident))
    await asyncio.sleep(0)
    texts.close()
    held.let_go()
    assert await first == "done"
    for late in (waiting, texts.run(LONG, "b", threading.get_ident)):
        with pytest.raises(Draining):
            await late
