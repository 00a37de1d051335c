"""A system whose tier is a real server: stopped and started again, damaged, frozen, with tenants apart.

Blocks are copied over tcp, so that the prefill worker reads the server, too. A router of others follows the
system by its KV events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from diptych.client import Client, Completion
from tests.diptych.runtime.conftest import Store
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack

pytestmark = pytest.mark.full
LENGTH, TOKENS, BLOCK = 320, 12, 16
PROMPTS = [tiny_model.prompt(8000 + number, LENGTH) for number in range(3)]
SECRET = "5e" * 32
LOADED = "diptych_kv_tier_blocks_loaded_total"
DAMAGED = "diptych_kv_tier_entries_damaged"


def answers(stack: Stack, prompts: Sequence[list[int]] = PROMPTS, salt: str = "") -> list[Completion]:
    with Client(stack.address) as client:
        return [
            client.generate(one, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, cache_salt=salt)
            for one in prompts
        ]


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(one.token_ids) for one in completions]


def cached(completions: Sequence[Completion]) -> list[int]:
    return [one.usage.cached_prompt_tokens for one in completions]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made = Store(tmp_path_factory.mktemp("tier") / "valkey")
    made.start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def system(
    server: Store, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[Stack]]:
    """Return a starter of systems over the server, which share their secret."""
    model = tiny_model.write(tmp_path_factory.mktemp("tiny"))
    flags = ["--model", str(model), "--model-name", "tiny", "--dtype", "fp32", "--prefill-chunk", "48"]
    flags += ["--transport", "tcp", "--set", "gateway.local-prefill=never", "--kv-blocks", "64"]
    flags += ["--kv-tier", server.url]
    return lambda *more: running_stack(*flags, *more, env={"DIPTYCH_SECRET": SECRET})


@pytest.fixture(scope="module")
def said(server: Store, system: Callable[..., AbstractContextManager[Stack]]) -> list[list[int]]:
    """Return the answers of a system that has stopped since; its blocks are in the server."""
    with system() as stack:
        first = tokens(answers(stack))
        stack.wait_idle()
        deadline = time.monotonic() + 60
        whole = len(PROMPTS) * ((LENGTH + TOKENS - 1) // BLOCK)
        while server.client().dbsize() < whole:
            assert time.monotonic() < deadline, f"{server.client().dbsize()} of {whole} blocks were stored"
            time.sleep(0.1)
    return first


def test_next_system_finds_the_blocks_and_both_workers_load_them(
    system: Callable[..., AbstractContextManager[Stack]], said: list[list[int]]
) -> None:
    with system() as stack:
        strangers = answers(stack, salt="another")
        assert tokens(strangers) == said
        assert cached(strangers) == [0] * len(PROMPTS), "another salt has other keys"
        before = stack.metric("decode", LOADED), stack.metric("prefill", LOADED)
        found = answers(stack)
        assert tokens(found) == said
        assert cached(found) == [(LENGTH - 1) // BLOCK * BLOCK] * len(PROMPTS)
        assert all(one.timings is not None and one.timings.tier_blocks > 0 for one in found)
        assert stack.metric("decode", LOADED) > before[0]
        assert stack.metric("prefill", LOADED) > before[1]


def test_server_that_stops_in_the_middle_costs_no_answer(
    server: Store, system: Callable[..., AbstractContextManager[Stack]], said: list[list[int]]
) -> None:
    with system() as stack:
        server.freeze()
        try:
            assert tokens(answers(stack)) == said
        finally:
            server.thaw()
        assert tokens(answers(stack, PROMPTS[::-1])) == said[::-1]


def test_damaged_entries_are_misses(
    server: Store, system: Callable[..., AbstractContextManager[Stack]], said: list[list[int]]
) -> None:
    client = server.client()
    for number, name in enumerate(sorted(client.scan_iter("diptych:kv:*"))):
        entry = bytearray(client.get(name))
        if number % 3 == 0:
            entry[-number - 1] ^= 4
        elif number % 3 == 1:
            del entry[len(entry) // 2 :]
        else:
            entry = bytearray(client.get(next(client.scan_iter("diptych:kv:*"))))
        client.set(name, bytes(entry))
    with system("--decode-workers", "2") as stack:
        assert tokens(answers(stack)) == said
        assert sum(stack.metric("decode", DAMAGED, number) for number in (0, 1)) > 0


def test_router_of_others_learns_what_the_system_holds(
    system: Callable[..., AbstractContextManager[Stack]], said: list[list[int]], tmp_path: Path
) -> None:
    pytest.importorskip("msgspec", reason="the extra `dev` has it")
    pytest.importorskip("zmq", reason="the extra `dev` has it")
    from tests.decode_worker.kv_events.vllm_reader import Reader

    folder = tmp_path / "events"
    address = f"ipc://{folder}/kv"
    with system("--kv-events", address, "--kv-events-topic", "kv@pod@tiny") as stack:
        with Reader(address, topic="kv@pod@") as reader:
            assert tokens(answers(stack)) == said
            full = (LENGTH + TOKENS - 1) // BLOCK * BLOCK
            whole = [tuple(prompt + answer) for prompt, answer in zip(PROMPTS, said, strict=True)]
            reader.until(lambda: reader.held(whole[-1]) == full)
            with Reader(address) as late:
                late.replay(f"{address}.replay", 0)
                assert [late.held(one) for one in whole] == [full] * len(whole)
        # What leaves the pool is in the tier.
        more = [tiny_model.prompt(8100 + number, LENGTH) for number in range(3)]
        answers(stack, more)
        with Reader(address) as late:
            late.replay(f"{address}.replay", 0)
            assert late.held(whole[0]) < full
            assert late.held(whole[0], "CPU") == full
