"""Redis killed, frozen, emptied, failed over, slow: no request fails, and first tokens come as before.

Look-ups are answered from the gateway's own copy, so that no request's path leads to Redis. The long form
prints how first tokens fared beside those of an undisturbed time:

    make test-full ARGS="tests/faults/test_redis_faults.py -s"
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.bench.cpu_time import CpuTime
from diptych.bench.figures import percentile
from diptych.client import AsyncClient
from tests.diptych.runtime.conftest import Store
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack
from tests.faults.proxy import Proxy, running_proxy

CLIENTS = 3
TOKENS = 6
PREFIX = tiny_model.prompt(99, 64)  # four blocks that all requests share


@dataclass(frozen=True)
class House:
    """A system that reaches `main` through the proxy; `spare` is another server."""

    stack: Stack
    proxy: Proxy
    main: Store
    spare: Store


Fault = Callable[[House], None]


def _kill(house: House) -> None:
    house.main.kill()
    house.proxy.cut()


def _fail_over(house: House) -> None:
    house.proxy.target = house.spare.port
    house.proxy.cut()


def _copy(house: House) -> None:
    """The spare server has what the main one has now, and falls behind from here on."""
    spare = house.spare.client()
    spare.replicaof("127.0.0.1", house.main.port)
    deadline = time.monotonic() + 60
    while spare.info("replication").get("master_link_status") != "up":
        assert time.monotonic() < deadline, "the copy did not come"
        time.sleep(0.02)
    spare.replicaof("NO", "ONE")


def _back(house: House) -> None:
    house.proxy.target = house.main.port
    house.proxy.cut()
    house.spare.client().flushall()


def _slow(house: House) -> None:
    house.proxy.delay_s = 0.1  # each way


def _quick(house: House) -> None:
    house.proxy.delay_s = 0.0


def _nothing(_: House) -> None:
    pass


SMALL_FORM = {"killed", "frozen"}
FAULTS: dict[str, tuple[Fault, Fault, Fault]] = {
    # before, at the beginning, at the end
    "killed": (_nothing, _kill, lambda house: house.main.start()),
    "frozen": (_nothing, lambda house: house.main.freeze(), lambda house: house.main.thaw()),
    "flushed": (_nothing, lambda house: house.main.client().flushall(), _nothing),
    "failed over to an empty one": (_nothing, _fail_over, _back),
    "failed over to an old copy": (_copy, _fail_over, _back),
    "200 ms away": (_nothing, _slow, _quick),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("faults")
    main, spare = Store(folder / "main"), Store(folder / "spare")
    main.start()
    spare.start()
    model = tiny_model.write(_made(folder / "model"))
    flags = ("--model", str(model), "--model-name", "tiny", "--dtype", "fp32", "--kv-blocks", "256")
    try:
        with running_proxy(main.port) as proxy:
            url = f"redis://127.0.0.1:{proxy.port}/0"
            with running_stack(*flags, "--decode-workers", "2", "--redis-url", url) as stack:
                yield House(stack, proxy, main, spare)
                stack.wait_idle()
    finally:
        main.kill()
        spare.kill()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def first_tokens(address: str, seconds: float) -> list[float]:
    """Seconds to the first token of every request of so long a time; any error fails the test."""
    found: list[float] = []
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        turn = 0
        async with AsyncClient(address, retries=0) as one:
            while time.monotonic() < until:
                turn += 1
                prompt = [*PREFIX, *tiny_model.prompt(1000 * number + turn, 8)]
                sent, tokens = time.monotonic(), 0
                async for chunk in one.stream(prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True):
                    if not tokens and chunk.token_ids:
                        found.append(time.monotonic() - sent)
                    tokens += len(chunk.token_ids)
                assert tokens == TOKENS

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
    return sorted(found)


def disturbed(house: House, name: str, seconds: float) -> list[float]:
    """First tokens while a fault begins, lasts and ends."""
    before, begin, end = FAULTS[name]
    before(house)

    async def play() -> list[float]:
        load = asyncio.create_task(first_tokens(house.stack.address, 2 * seconds))
        await asyncio.sleep(seconds / 4)
        try:
            await asyncio.to_thread(begin, house)
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(end, house)
        return await load

    return asyncio.run(play())


def wait_connected(house: House) -> None:
    """Until the gateway follows the directory again, and finds the shared prefix in it."""
    deadline = time.monotonic() + 60
    while not house.stack.metric("gateway", "diptych_directory_connected"):
        assert time.monotonic() < deadline, "the gateway did not come back to Redis"
        time.sleep(0.05)
    workers: set[bytes] = set()
    with contextlib.closing(house.main.client()) as redis:
        while len(workers) < 3:
            assert time.monotonic() < deadline, f"not all workers are back in the directory: {workers}"
            members = redis.smembers("diptych:workers")
            workers = {m for m in members if redis.exists(b"diptych:worker:" + m)}  # type: ignore[union-attr]
            time.sleep(0.05)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SMALL_FORM else pytest.mark.full) for name in FAULTS]
)
def test_no_request_fails_and_everybody_comes_back(house: House, name: str) -> None:
    assert len(disturbed(house, name, 1.0)) >= CLIENTS
    wait_connected(house)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_first_tokens_come_as_before(house: House) -> None:
    asyncio.run(first_tokens(house.stack.address, 2.0))
    rows = []
    for name in FAULTS:
        # Each beside a calm time of its own: the machine may have more to do later.
        began = CpuTime.now()
        calm = asyncio.run(first_tokens(house.stack.address, 12.0))
        found = disturbed(house, name, 8.0)  # longer than a lease
        rows.append((name, calm, found, CpuTime.now().steal_since(began)))
        wait_connected(house)
    print("\n| Redis is | requests | failed | TTFT p99 | before | added | stolen |")
    print("|---|---|---|---|---|---|---|")
    for name, calm, found, stolen in rows:
        p99, base = 1000 * percentile(found, 99), 1000 * percentile(calm, 99)
        times = f"{p99:.0f} ms | {base:.0f} ms | {p99 - base:+.0f} ms"
        print(f"| {name} | {len(found)} | 0 | {times} | {stolen:.0%} |")
    assert all(len(found) > 50 for _, _, found, _ in rows)
