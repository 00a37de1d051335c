"""Decode steps launched before the tokens of the one before are known: the same tokens, greedy and drawn,
with finishes, cancels, preemptions and lost gateways in between, and every block comes back.

The device is the CPU, and its kernels are their meanings; loops, buffers and pipeline are those of a GPU.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from engine.batch import AbortWords, SequenceStep
from engine.decode_graphs import DecodeGraphs, LaunchedStep
from engine.sampling import SampleRow
from tests.worker import test_random_choices, test_random_interleavings
from tests.worker.asker import Gateway, work
from tests.worker.house import VOCABULARY, greedy, house
from worker.step import InFlight

Draws = Sequence[SampleRow | None]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts rows that were launched: those that follow a row, and others."""
    counted: Counter[str] = Counter()
    launch = DecodeGraphs.launch

    def counting(
        graphs: DecodeGraphs, sequences: Sequence[SequenceStep], draws: Draws, abort: AbortWords | None
    ) -> LaunchedStep:
        counted.update("others" if step.follows is None else "following" for step in sequences)
        return launch(graphs, sequences, draws, abort)

    monkeypatch.setattr(DecodeGraphs, "launch", counting)
    return counted


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What steps that fail would log."""
    return [r.getMessage() for r in caplog.records if r.name.startswith(("decode_worker", "worker"))]


async def test_greedy_requests_in_random_order(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_interleavings, "REQUESTS", 70)
    async with house("shared_memory", decodes=2, prefills=2, blocks=20, launching=True) as made:
        walk = test_random_interleavings.Walk(made, 3)
        await walk.run()
        assert await made.empty() == []
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 0, walk.outcomes
    assert walk.outcomes["cancelled"] > 0, walk.outcomes
    assert launches["following"] > 0, launches


async def test_drawn_choices_and_beams_in_random_order(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_choices, "REQUESTS", 60)
    async with house("shared_memory", prefills=2, blocks=20, launching=True) as made:
        walk = test_random_choices.Walk(made, 4)
        await walk.run()
        assert await made.empty() == []
        await walk.gateway.close()
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 10, walk.outcomes
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes
    assert launches["following"] > 0, launches


async def test_all_tokens_but_the_first_two_of_a_lone_request_follow_others(launches: Counter[str]) -> None:
    prompt = (5, 9, 2)
    async with house("shared_memory", blocks=24, launching=True) as made:
        gateway = Gateway(made)
        heard = gateway.start(made.decodes[0], made.prefills[0], work(("r", 1), prompt, 20))
        await heard.ended.wait()
        assert tuple(heard.tokens) == greedy(prompt, 20)
        assert await made.empty() == []
        await gateway.close()
    assert launches == {"others": 1, "following": 18}  # the first token came with the prompt
    assert made.decodes[0].loop.steps == 19


@pytest.mark.parametrize("failing", ["launch ahead", "collect"])
async def test_a_step_that_fails_on_the_device_is_computed_again(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in eight times: the rows are computed alone, and nothing goes on from tokens that nobody saw."""
    calls = Counter[str]()
    launch, read = DecodeGraphs.launch, DecodeGraphs._read

    def launching(graphs: DecodeGraphs, sequences: Sequence[SequenceStep], *rest: Any) -> LaunchedStep:
        calls["launch"] += 1
        if failing == "launch ahead" and sequences[0].follows is not None and calls["launch"] % 8 == 0:
            raise RuntimeError("no room for a launch")
        return launch(graphs, sequences, *rest)

    def reading(graphs: DecodeGraphs, *rest: Any) -> Any:
        calls["read"] += 1
        drawn = read(graphs, *rest)
        if failing == "collect" and calls["read"] % 8 == 0:
            raise RuntimeError("the device gave nothing")
        return drawn

    monkeypatch.setattr(DecodeGraphs, "launch", launching)
    monkeypatch.setattr(DecodeGraphs, "_read", reading)
    prompts = [tuple((7 * n + k) % VOCABULARY for k in range(1 + 3 * n)) for n in range(4)]
    async with house("shared_memory", blocks=64, launching=True) as made:
        gateway = Gateway(made)
        heard = [
            gateway.start(made.decodes[0], made.prefills[0], work((f"r{n}", 1), prompt, 24))
            for n, prompt in enumerate(prompts)
        ]
        for one in heard:
            await one.ended.wait()
        assert [tuple(one.tokens) for one in heard] == [greedy(prompt, 24) for prompt in prompts]
        assert await made.empty() == []
        await gateway.close()


def test_a_row_is_given_up_in_every_step_that_has_it() -> None:
    from worker.step import StepThread

    thread: StepThread[object] = StepThread()
    one, other = object(), object()
    present: InFlight[object] = thread.begin([one, other])
    following = thread.begin([other])
    thread.abort(other)
    assert (present.abort.words.tolist(), following.abort.words.tolist()) == ([0, 1], [1])
    thread.end(present)
    assert (thread.writes(one), thread.writes(other), thread.busy) == (False, True, True)
    thread.end(following)
    assert not thread.busy
    thread.close()
