"""No token is lost or repeated when workers die: answers equal those of a run without faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from diptych.client import Client, Completion
from tests.faults.conftest import Breakable
from tests.faults.failpoints import kill
from tests.faults.requests import ASKS, TIMEOUT_S, ask, check_same, prompt_of, retries

pytestmark = pytest.mark.timeout(1800)  # only a starved machine needs more than a minute

TRIES = 4
ARRIVE_S = 1.0  # less than the silence after which the gateway gives a worker up
IDLE_S = 300.0  # a worker that is started again counts as busy


def ask_while(system: Breakable, act: Callable[[], object], *, length: int = 100) -> dict[str, Completion]:
    """The answers to all questions, during which something is done."""
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, system.address, ASKS, length=length)
        act()
        return asked.result()


# --- one worker a role ------------------------------------------------------------------------------------


def test_every_way_of_generating_survives_the_death_of_the_only_decode_worker(laptop: Breakable) -> None:
    """All at once on one worker, which dies in the middle; they wait for the next one and go on.

    On a busy machine it may be dead, or found silent, before the last of them is there: then they are all
    asked again.
    """
    expected = ask(laptop.address, ASKS)
    unbroken: set[str] = set()
    for _ in range(TRIES):
        laptop.stack.wait_idle(IDLE_S)
        laptop.armory.arm("decode.step", "freeze", after=12)
        answers = ask_while(laptop, lambda: kill_when_all_run(laptop))
        check_same(expected, answers)
        unbroken = {name for name, answer in answers.items() if not retries([answer])}
        if not unbroken:
            break
    assert not unbroken
    laptop.stack.wait_idle(IDLE_S)


def kill_when_all_run(system: Breakable) -> None:
    """Kill the decode worker that stopped in a step, once the gateway has sent it every question."""
    stopped = system.armory.wait_taken("decode.step")
    until = time.monotonic() + ARRIVE_S
    while system.stack.metric("gateway", "diptych_requests_running") < len(ASKS) and time.monotonic() < until:
        time.sleep(0.02)
    kill(stopped)


def test_a_prefill_worker_that_is_killed_between_two_chunks_is_made_up_for(laptop: Breakable) -> None:
    laptop.armory.arm("prefill.chunk", "freeze", after=2)
    answers = ask_while(laptop, lambda: kill(laptop.armory.wait_taken("prefill.chunk")), length=130)
    assert retries(answers.values())
    check_same(ask(laptop.address, ASKS, length=130), answers)
    laptop.stack.wait_idle(IDLE_S)


def test_a_stop_string_that_has_begun_is_found_after_the_death_too(laptop: Breakable) -> None:
    """It lies across the token at which the worker dies: its beginning is held back in the gateway.

    Its ends come from shorter answers: how many tokens a piece of a stream has depends on the machine.
    """
    with Client(laptop.address, retries=0) as client:
        prompt, greedy = prompt_of("greedy"), ASKS["greedy"]
        before, through = (
            client.generate(prompt, timeout_s=TIMEOUT_S, **{**greedy, "max_tokens": tokens}).text
            for tokens in (8, 20)
        )
        assert through.startswith(before)
        stop = through[len(before) :]
        options = {**greedy, "stop": [stop]}
        expected = client.generate(prompt, timeout_s=TIMEOUT_S, **options)
        laptop.armory.arm("decode.step", "crash", after=12)
        with client.stream(prompt, timeout_s=TIMEOUT_S, **options) as stream:
            for _ in stream:
                pass
            answer = stream.received.completion()
    assert laptop.armory.taken("decode.step")
    assert retries([answer]) >= 1  # more where the machine is so busy that a heartbeat comes too late as well
    assert answer.choices == expected.choices
    assert answer.first.stop_text == stop
    laptop.stack.wait_idle(IDLE_S)


@pytest.mark.parametrize("where", ["decode.not_finite", "prefill.not_finite"])
def test_a_row_without_a_number_is_computed_again(laptop: Breakable, where: str) -> None:
    """Nothing of it is shown, and what it left in the cache is not read."""
    expected = ask(laptop.address, ["seeded"])
    laptop.armory.arm(where, "fail", after=5 if where.startswith("decode") else 0)
    answers = ask(laptop.address, ["seeded"])
    check_same(expected, answers)
    assert retries(answers.values()) == 1
    usage = answers["seeded"].usage
    assert usage is not None
    laptop.stack.wait_idle(IDLE_S)


# --- two workers a role -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "where",
    [
        *("prefill.queued", "prefill.asked", "prefill.granted", "prefill.chunk", "prefill.before_commit"),
        *("prefill.committed", "decode.attached", "decode.verified", "decode.step"),
    ],
)
def test_wherever_it_dies_the_other_worker_goes_on(pairs: Breakable, where: str) -> None:
    check_death_at(pairs, where)


def check_death_at(pairs: Breakable, where: str) -> None:
    expected = ask(pairs.address, ASKS)
    pairs.stack.wait_idle(IDLE_S)
    pairs.armory.arm(where, "crash", after=12 if where == "decode.step" else 1)
    length = 100 if where.startswith("decode") else 131  # prompts that are cached have one chunk
    if length != 100:
        expected = {}
    answers = ask(pairs.address, ASKS, length=length)
    assert pairs.armory.taken(where)
    check_same(expected or ask(pairs.address, ASKS, length=length), answers)
    assert where == "prefill.committed" or retries(answers.values())
    pairs.stack.wait_idle(IDLE_S)
