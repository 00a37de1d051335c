"""Every process is replaced under load, and no client notices: no error, no token lost, none twice."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from diptych.cli.control import ask_restart
from diptych.client import AsyncClient
from tests.end_to_end import reference, tiny_model
from tests.end_to_end.stack import Stack, StackFailed, http_root, running_stack

CLIENTS = 4


async def one_stream(client: AsyncClient, prompt: list[int], tokens: int) -> list[int]:
    ids: list[int] = []
    async for chunk in client.stream(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
        ids += chunk.token_ids
    return ids


async def restarts_under_load(
    stack: Stack, prompts: list[list[int]], tokens: int, rounds: int
) -> list[tuple[int, list[int]]]:
    """Streams all the time while every process is restarted, `rounds` times: (prompt's number, answer)."""
    port = stack.account["gateway"]["grpc_port"]
    over = asyncio.Event()
    answers: list[tuple[int, list[int]]] = []

    async def client(number: int) -> None:
        async with AsyncClient(stack.address) as one:
            turn = number
            while not over.is_set():
                turn = (turn + CLIENTS) % len(prompts)
                answers.append((turn, await one_stream(one, prompts[turn], tokens)))

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
        said: list[str] = []
        try:
            for _ in range(rounds):
                before = set(stack.pids())
                assert await asyncio.to_thread(ask_restart, port, [], said.append), said
                assert not before & set(stack.pids()), "a process was left as it was"
            await asyncio.sleep(0.5)
        finally:
            over.set()
    return answers


def one_answer_each(answers: list[tuple[int, list[int]]], tokens: int) -> dict[int, list[int]]:
    """By prompt: each answer is whole, and the same whenever it was asked for."""
    first: dict[int, list[int]] = {}
    for number, ids in answers:
        assert len(ids) == tokens
        assert first.setdefault(number, ids) == ids, "an answer changed on the way"
    return first


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    folder = tiny_model.write(tmp_path_factory.mktemp("tiny"))
    flags = ("--model", str(folder), "--model-name", "tiny", "--dtype", "fp32")
    with running_stack(*flags, "--kv-blocks", "256") as stack:
        yield stack, folder
        stack.wait_idle()


def test_no_client_notices_that_every_process_was_replaced(tiny: tuple[Stack, Path]) -> None:
    stack, _ = tiny
    prompts = [tiny_model.prompt(seed, 20) for seed in range(8)]
    answers = asyncio.run(restarts_under_load(stack, prompts, tokens=60, rounds=1))
    one_answer_each(answers, 60)
    assert len(answers) > len(prompts)


async def http_clients_meanwhile(stack: Stack, names: list[str]) -> list[tuple[int, bytes]]:
    """What clients of OpenAI's API get on connections that they keep, never idle, while these restart."""
    port, url = stack.account["gateway"]["grpc_port"], f"{http_root(stack)}/v1/completions"
    over = asyncio.Event()
    answers: list[tuple[int, bytes]] = []

    async def client(number: int) -> None:
        ask = {"model": "tiny", "prompt": tiny_model.prompt(number, 20), "max_tokens": 30, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            while not over.is_set():
                async with session.post(url, json={**ask, "stream": number % 2 == 0}) as response:
                    answers.append((response.status, await response.read()))

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
        said: list[str] = []
        try:
            assert await asyncio.to_thread(ask_restart, port, names, said.append), said
            await asyncio.sleep(0.5)
        finally:
            over.set()
    return answers


def test_no_http_client_loses_a_request_on_a_connection_that_it_keeps(tiny: tuple[Stack, Path]) -> None:
    stack, _ = tiny
    answers = asyncio.run(http_clients_meanwhile(stack, ["gateway"]))
    assert len(answers) > CLIENTS
    for status, body in answers:
        assert status == 200
        assert body.endswith((b"data: [DONE]\n\n", b"}"))


def test_who_asks_for_something_else_is_told(tiny: tuple[Stack, Path]) -> None:
    stack, _ = tiny
    said: list[str] = []
    before = stack.pids()
    assert not ask_restart(stack.account["gateway"]["grpc_port"], ["decode-7"], said.append)
    assert "no decode-7; there are valkey, gateway" in said[-1]
    assert stack.pids() == before
    assert os.path.exists(f"/proc/{before[0]}")


def test_a_second_system_does_not_share_the_ports(tiny: tuple[Stack, Path]) -> None:
    stack, folder = tiny
    port = stack.account["gateway"]["grpc_port"]
    second = running_stack("--model", str(folder), "--grpc-port", str(port))
    with pytest.raises(StackFailed, match=f"port {port} of 127.0.0.1 is taken"), second:
        pass
    with socket.create_connection(("127.0.0.1", port)):
        pass


@pytest.mark.full
@pytest.mark.timeout(900)
def test_three_times_with_the_real_model() -> None:
    """`make test-full ARGS="tests/end_to_end/test_rolling_restart.py -s"` prints how many streams met it."""
    prompts = [list(prompt) for prompt in reference.prompts() if len(prompt) <= 65][:12]
    flags = ("--dtype", "fp32", "--prefill-workers", "2", "--decode-workers", "2", "--kv-memory-mib", "256")
    with running_stack(*flags) as stack:
        began = time.monotonic()
        answers = asyncio.run(restarts_under_load(stack, prompts, tokens=64, rounds=3))
        took = time.monotonic() - began
        print(
            f"\n3 restarts of {len(stack.pids())} processes in {took:.0f} s: {len(answers)} streams, 0 errors"
        )
        stack.wait_idle()
    begin = reference.MOST_TOKENS
    for number, ids in one_answer_each(answers, 64).items():
        assert ids[:begin] == list(reference.greedy(tuple(prompts[number]), begin))
    assert len(answers) > 3 * len(prompts)
