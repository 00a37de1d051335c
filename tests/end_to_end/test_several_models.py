"""Two models and a canary under load, one of them replaced: no client sees an error.

Real models, real processes: each has weights of its own, so that every answer shows which one made it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from diptych.client import AsyncClient, Client
from diptych.runtime.model_digest import model_digest
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, http_root, running_stack
from tests.faults.second_gateway import second_gateway

TOKENS = 24
CLIENTS = 6
WIDTHS = {"v1": 96, "v2": 128, "v3": 160}
"""Widths of the models' feed-forward layers, by which their weights differ."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer to a client: the digest of its model, and its tokens."""

    digest: str
    ids: tuple[int, ...]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: tiny_model.write(tmp_path_factory.mktemp(name), intermediate_size=width)
        for name, width in WIDTHS.items()
    }


@pytest.fixture(scope="module")
def stack(folders: dict[str, Path]) -> Iterator[Stack]:
    flags = [part for name in ("v1", "v2") for part in ("--model", f"{name}={folders[name]}")]
    flags += ["--model-split", "chat=v1:90,v2:10", "--dtype", "fp32", "--kv-blocks", "256"]
    with running_stack(*flags) as one:
        yield one
        one.wait_idle()


def command(stack: Stack, *words: str) -> str:
    """Run `diptych model` against the system; return what it prints."""
    port = str(stack.account["gateway"]["grpc_port"])
    return order(stack.admin_address, *words, *(() if words[0] == "list" else ("--grpc-port", port)))


def order(admin_address: str, *words: str) -> str:
    """Run `diptych model` against a gateway; return what it prints."""
    where = ("--address", admin_address)
    argv = [sys.executable, "-m", "diptych", "model", *words, *where]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def grpc_client(stack: Stack, over: asyncio.Event, answers: list[Answer], number: int) -> None:
    """Stream from the alias until it is over."""
    prompt = tiny_model.prompt(number, 20)
    async with AsyncClient(stack.address, model="chat") as client:
        while not over.is_set():
            ids: list[int] = []
            digest = ""
            async for chunk in client.stream(prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True):
                digest = digest or chunk.model_digest
                ids += chunk.token_ids
            answers.append(Answer(digest, (number, *ids)))


async def http_client(stack: Stack, over: asyncio.Event, answers: list[Answer], number: int) -> None:
    """Complete with the alias over HTTP until it is over."""
    ask = {"model": "chat", "prompt": tiny_model.prompt(number, 20), "max_tokens": TOKENS, "ignore_eos": True}
    ask |= {"temperature": 0, "return_token_ids": True}
    async with aiohttp.ClientSession() as session:
        while not over.is_set():
            async with session.post(f"{http_root(stack)}/v1/completions", json=ask) as response:
                body = await response.json()
                assert response.status == 200, body
                ids = body["choices"][0]["token_ids"]
                answers.append(Answer(body["system_fingerprint"].removeprefix("fp_"), (number, *ids)))


async def under_load(stack: Stack, *steps: list[str]) -> list[Answer]:
    """Return the answers of clients that ask all the time, while `diptych model` is called step by step."""
    over, answers = asyncio.Event(), list[Answer]()
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            kind = http_client if number % 2 else grpc_client
            group.create_task(kind(stack, over, answers, number))
        try:
            for words in steps:
                before = len(answers)
                while len(answers) < before + 40:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(command, stack, *words)
            await asyncio.sleep(1.0)
        finally:
            over.set()
    return answers


def by_digest(answers: list[Answer], folders: dict[str, Path]) -> dict[str, list[Answer]]:
    """Return the answers by model; each model says the same to the same prompt whenever it is asked."""
    names = {model_digest(folder)[:12]: name for name, folder in folders.items()}
    found: dict[str, list[Answer]] = {}
    for one in answers:
        assert len(one.ids) == TOKENS + 1
        found.setdefault(names[one.digest[:12]], []).append(one)
    for model, some in found.items():
        says = {one.ids[0]: one.ids for one in some}
        assert all(one.ids == says[one.ids[0]] for one in some), f"{model} changed its answer"
    return found


@pytest.mark.full
def test_no_client_notices_that_a_model_behind_a_canary_was_replaced(
    stack: Stack, folders: dict[str, Path]
) -> None:
    before = set(stack.pids())
    answers = asyncio.run(
        under_load(
            stack,
            ["load", "v3", str(folders["v3"])],
            ["alias", "chat", "v3:90", "v2:10"],
            ["unload", "v1"],
            ["load", "v2", str(folders["v1"])],  # in place: v2 is v1's content from here on
        )
    )
    found = by_digest(answers, folders)
    counts = Counter({model: len(some) for model, some in found.items()})
    print("answers by model:", dict(counts))
    assert counts.keys() == {"v1", "v2", "v3"}
    assert found["v1"][0].ids != found["v3"][0].ids, "the models cannot be told apart"
    models = {one["model"] for role in ("prefill", "decode") for one in stack.account[role]}
    assert models == {"v2", "v3"}
    assert len(before & set(stack.pids())) == 2, "the gateway and Valkey alone are the processes of before"
    port = stack.account["gateway"]["grpc_port"]
    restarted = subprocess.run(
        [sys.executable, "-m", "diptych", "restart", "gateway", "--grpc-port", str(port)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert restarted.returncode == 0, restarted.stdout + restarted.stderr
    listed = command(stack, "list")
    assert "chat stands for v3 90%, v2 10%" in listed
    assert str(folders["v1"]) in listed


@pytest.mark.full
def test_canary_gets_its_share_and_metrics_tell_the_versions_apart(
    stack: Stack, folders: dict[str, Path]
) -> None:
    answers = asyncio.run(under_load(stack, ["list"], ["list"], ["list"], ["list"], ["list"]))
    counts = Counter({model: len(some) for model, some in by_digest(answers, folders).items()})
    first, second = counts.most_common(2)
    assert first[1] > 4 * second[1], counts
    with urllib.request.urlopen(f"{http_root(stack)}/metrics", timeout=20) as page:
        lines = page.read().decode().splitlines()
    assert sum(line.startswith("diptych_model_info{") for line in lines) == 2
    with urllib.request.urlopen(f"{http_root(stack)}/v1/models", timeout=20) as page:
        assert [one["id"] for one in json.load(page)["data"]] == ["v2", "v3", "chat"]


@pytest.mark.full
def test_second_gateway_knows_what_the_first_was_told_and_tells_it_in_turn(folders: dict[str, Path]) -> None:
    flags = ["--model", f"v1={folders['v1']}", "--dtype", "fp32", "--kv-blocks", "256", "--show-secrets"]
    with running_stack(*flags) as stack:
        command(stack, "load", "v2", str(folders["v2"]))
        command(stack, "alias", "chat", "v2")
        model = {"DIPTYCH_MODEL": f"v1={folders['v1']}"}
        with second_gateway(stack, environment=model) as second:
            assert first_words(second.address) == first_words(stack.address) == "v2"
            order(second.admin_address, "alias", "chat", "v1")
            deadline = time.monotonic() + 30
            while first_words(stack.address) != "v1":
                assert time.monotonic() < deadline, "the first gateway did not follow"
                time.sleep(0.1)
            assert "chat stands for v1 100%" in command(stack, "list")


def first_words(address: str) -> str:
    """Ask the alias `chat` of a gateway; return the name of the model that answers."""
    with Client(address, model="chat") as client:
        return client.generate(tiny_model.prompt(1, 20), max_tokens=4, timeout_s=30).model
