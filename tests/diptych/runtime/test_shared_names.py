"""Names that processes agree on, over a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from diptych.cli.valkey import valkey_binary
from diptych.runtime.discovery.shared_names import DROPPED_S, SharedNames, Values
from tests.gateway.running_gateway import until, valkey


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with valkey() as url:
        yield url


class Process:
    """A process that takes part; ``seen`` is what it knows."""

    def __init__(
        self, redis_url: str, scope: str, clock: Callable[[], float] = time.time, **names: Any
    ) -> None:
        self.seen: Values = dict(names)
        self.names = SharedNames(redis_url, scope, self._changed, clock)
        for name, value in names.items():
            self.names.put(name, value)

    def _changed(self, values: Values) -> None:
        self.seen = values


@asynccontextmanager
async def taking_part(*processes: Process) -> AsyncIterator[None]:
    for one in processes:
        one.names.start()
    try:
        yield
    finally:
        for one in processes:
            await one.names.close()


async def test_what_one_names_the_others_know(redis_url: str) -> None:
    one, two = Process(redis_url, "known", a={"digest": "1"}), Process(redis_url, "known")
    async with taking_part(one, two):
        await until(lambda: two.seen == {"a": {"digest": "1"}})
        two.names.put("b", {"digest": "2"})
        await until(lambda: set(one.seen) == {"a", "b"})
        one.names.drop("a")
        await until(lambda: set(two.seen) == {"b"})
        two.names.put("b", {"digest": "3"})
        await until(lambda: one.seen == {"b": {"digest": "3"}})


async def test_scopes_share_nothing(redis_url: str) -> None:
    one, two = Process(redis_url, "mine", a={}), Process(redis_url, "yours")
    async with taking_part(one, two):
        await one.names.synchronise()
        await two.names.synchronise()
        assert two.seen == {}


async def test_a_store_that_lost_its_data_gets_the_names_again(redis_url: str) -> None:
    one, two = Process(redis_url, "lost", a={"digest": "1"}), Process(redis_url, "lost")
    redis = Redis.from_url(redis_url)
    async with taking_part(one, two):
        await until(lambda: "a" in two.seen)
        await redis.flushall()
        await until(lambda: bool(one.seen and two.seen))
        await one.names.synchronise()
        await two.names.synchronise()
        assert (one.seen, two.seen) == ({"a": {"digest": "1"}}, {"a": {"digest": "1"}})
        assert await redis.hget("diptych:names:lost", "a") is not None
    await redis.aclose()


async def test_without_a_server_each_has_its_own_and_joins_later(unused_tcp_port: int) -> None:
    """Waiting for a store that is away stops nobody, and what was dropped meanwhile stays dropped."""
    url = f"redis://127.0.0.1:{unused_tcp_port}/0"
    one, two = Process(url, "late", a={"digest": "1"}, gone={"digest": "0"}), Process(url, "late")
    async with taking_part(one, two):
        await asyncio.sleep(0.1)
        one.names.drop("gone")
        assert two.seen == {}
        command = [str(valkey_binary()), "--port", str(unused_tcp_port), "--save", ""]
        server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        try:
            await until(lambda: two.seen == {"a": {"digest": "1"}})
        finally:
            server.kill()
            await server.wait()


async def test_a_store_that_fell_back_to_an_older_copy_is_told_again(redis_url: str) -> None:
    one = Process(redis_url, "stale", a={"digest": "1"}, gone={"digest": "0"})
    await one.names.synchronise()
    redis = Redis.from_url(redis_url)
    old = await redis.hgetall("diptych:names:stale")
    one.names.put("a", {"digest": "2"})
    one.names.drop("gone")
    one.names.put("new", {"digest": "3"})
    await one.names.synchronise()
    await redis.delete("diptych:names:stale")
    await redis.hset("diptych:names:stale", mapping=old)
    two = Process(redis_url, "stale")
    await two.names.synchronise()
    assert two.seen == {"a": {"digest": "1"}, "gone": {"digest": "0"}}
    await one.names.synchronise()
    await two.names.synchronise()
    assert one.seen == {"a": {"digest": "1"}, "gone": {"digest": "0"}}  # as it began: others had no news
    assert two.seen == {"a": {"digest": "2"}, "new": {"digest": "3"}}
    for process in (one, two):
        await process.names.close()
    await redis.aclose()


async def test_dropped_names_are_forgotten_after_a_while(redis_url: str) -> None:
    now = time.time()
    one = Process(redis_url, "dropped", lambda: now, a={"digest": "1"})
    two = Process(redis_url, "dropped", lambda: now)
    await one.names.synchronise()
    await two.names.synchronise()
    redis = Redis.from_url(redis_url)
    one.names.drop("a")
    await one.names.synchronise()
    await two.names.synchronise()
    assert two.seen == {}
    assert await redis.hlen("diptych:names:dropped") == 1
    now += DROPPED_S + 1
    await one.names.synchronise()
    await two.names.synchronise()
    await one.names.synchronise()
    assert await redis.hlen("diptych:names:dropped") == 0
    for process in (one, two):
        await process.names.close()
    await redis.aclose()


async def test_what_others_wrote_there_is_passed_over(redis_url: str) -> None:
    redis = Redis.from_url(redis_url)
    good = '{"at": 1, "value": {"digest": "1"}}'
    junk = {"a": "[1]", "b": "{", "c": good, "d": '{"at": "x", "value": {}}', "e": "{}", b"\xff": good}
    await redis.hset("diptych:names:junk", mapping=junk)
    one = Process(redis_url, "junk")
    await one.names.synchronise()
    assert one.seen == {"c": {"digest": "1"}}
    await one.names.close()
    await redis.aclose()
