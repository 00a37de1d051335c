"""A request under which a prefill and a decode worker die together, twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.client import CallFailed, Client
from tests.end_to_end import reference
from tests.end_to_end.stack import REQUEST_GAUGES, Stack, running_stack
from tests.faults.conftest import Breakable
from tests.faults.failpoints import Armory, kill
from tests.faults.system import PAIRS, eventually, flush_prefixes, settle

WAIT_S = 300.0  # longer than the test may take: it is the proof that ends the request, and not the time
# Of the bundled weights, so that an innocent stream lasts for as long as the two blows take.
INNOCENT: dict[str, Any] = {
    "max_tokens": 200,
    "temperature": 1.0,
    "seed": 7,
    "ignore_eos": True,
    "timeout_s": WAIT_S,
}
POISON = "Tell me about the rivers of Europe, one after the other. " * 20  # several chunks


@pytest.fixture
def bundled(tmp_path: Path) -> Iterator[Breakable]:
    armory = Armory(tmp_path)
    flags = ("--dtype=fp32", "--prefill-chunk=48", "--kv-memory-mib=256", *PAIRS)
    wait = f"--set=gateway.worker-wait-timeout={WAIT_S}"
    with running_stack(*flags, wait, env=armory.environment) as stack:
        yield Breakable(stack, armory)


def kill_all(*pids: int) -> None:
    for pid in pids:
        kill(pid)


def requests_of(stack: Stack) -> list[int]:
    """How many requests each decode worker has."""
    count = len(stack.account["decode"])
    return [int(sum(stack.metric("decode", name, i) for name in REQUEST_GAUGES)) for i in range(count)]


@pytest.mark.full
def test_a_request_that_kills_a_pair_twice_gets_no_third_and_a_stream_beside_it_goes_on(
    bundled: Breakable,
) -> None:
    """The deaths of a pair count once, so that the second pair is the last."""
    stack, armory = bundled.stack, bundled.armory
    prompts = [prompt for prompt in reference.prompts() if len(prompt) in (31, 32)]
    with Client(stack.address, retries=0) as client, ThreadPoolExecutor(1) as other:
        expected = [client.generate(prompt, **INNOCENT).first.token_ids for prompt in prompts]
        stack.wait_idle()
        flush_prefixes(stack)
        streams = [client.stream(prompt, **INNOCENT) for prompt in prompts]
        begun = [list(next(streams[0]).token_ids)]
        place = requests_of(stack).index(1)  # of the first stream
        begun.append(list(next(streams[1]).token_ids))
        eventually(lambda: requests_of(stack) == [1, 1], 10, "a stream on each decode worker")
        armory.arm("prefill.chunk", "freeze", after=2)
        poison = other.submit(client.generate, POISON, max_tokens=4, timeout_s=WAIT_S)
        stopped = armory.wait_taken("prefill.chunk")
        armory.arm("prefill.chunk", "freeze", after=2)  # at once: a starved gateway gives up what is stopped
        beside = requests_of(stack).index(2)
        going_on = 1 if beside == place else 0
        streams[1 - going_on].close()  # at both deaths it would share the poison's fate
        eventually(lambda: requests_of(stack)[beside] == 1, 10, "the poison is alone")
        decode = [one["pid"] for one in stack.account["decode"]]
        kill_all(stopped, decode[beside])
        kill_all(armory.wait_taken("prefill.chunk"), decode[1 - beside])
        began = time.monotonic()
        with pytest.raises(CallFailed) as failed:
            poison.result()
        assert failed.value.code is grpc.StatusCode.INTERNAL
        assert "2 workers died under it" in stack.log.read_text()
        assert time.monotonic() - began < WAIT_S / 2
        for chunk in streams[going_on]:
            begun[going_on] += chunk.token_ids
        assert tuple(begun[going_on]) == expected[going_on]
        timings = streams[going_on].received.completion().timings
        assert timings is not None
        assert timings.retries == 1
    settle(stack)
