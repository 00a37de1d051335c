"""Names that processes agree on, over a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from diptych.cli.valkey import valkey_binary
from diptych.runtime.discovery.shared_names import SharedNames, Values
from tests.gateway.running_gateway import until, valkey


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with valkey() as url:
        yield url


class Process:
    """A process that takes part; ``seen`` is what it knows."""

    def __init__(self, redis_url: str, scope: str, **names: Any) -> None:
        self.seen: Values = dict(names)
        self.names = SharedNames(redis_url, scope, self._changed)
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
    """Nothing waits for it, and what was dropped meanwhile stays dropped."""
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


async def test_what_others_wrote_there_is_passed_over(redis_url: str) -> None:
    redis = Redis.from_url(redis_url)
    await redis.hset(
        "diptych:names:junk", mapping={"a": "[1]", "b": "{", "c": '{"digest": "1"}', b"\xff": "1"}
    )
    one = Process(redis_url, "junk")
    await one.names.synchronise()
    assert one.seen == {"c": {"digest": "1"}}
    await one.names.close()
    await redis.aclose()
