"""Steps that compute drafts: the same tokens in fewer steps, whatever the drafts are worth.

The device is the CPU, as in test_launched_ahead; what it can launch ahead, and may not while drafts are made,
is part of this.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest

from decode_worker.sequence import DecodeSequence
from diptych.engine.backends.triton.decode_graphs import DecodeGraphs
from diptych.engine.batch import Launched, SequenceStep
from diptych.engine.models.shape import ModelShape
from tests.diptych.worker_process import test_random_choices, test_random_interleavings
from tests.diptych.worker_process.both_workers import MODELS, VOCABULARY, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, Heard, work
from tests.diptych.worker_process.test_launched_ahead import complaints
from tests.forms import sampled

PROMPT = (5, 9, 2)
ASKED = 20
"""Tokens of the model's text that are looked up at once."""


class Knowing:
    """Drafts what the model of a shape will say where it is greedy, but for a share of the tokens."""

    def __init__(self, wrong: float, resting: float = 0.0, shape: ModelShape | None = None) -> None:
        self._rng = random.Random(7)
        self._wrong, self._resting, self._shape = wrong, resting, shape
        self.drafted = 0

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        return [self._draft(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _draft(self, sequence: DecodeSequence, count: int) -> Sequence[int]:
        row = sequence.next_row
        said = len(row.output_ids)
        known = -(-(said + count) // ASKED) * ASKED
        truth = greedy(tuple(row.prompt_ids), known, shape=self._shape)[said : said + count]
        self.drafted += count
        return [self._rng.randrange(VOCABULARY) if self._rng.random() < self._wrong else t for t in truth]

    def rests(self, sequence: DecodeSequence) -> bool:
        return self._rng.random() < self._resting


@pytest.fixture(params=MODELS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("wrong", "steps"), [(0.0, (5, 5)), (1.0, (16, 19))])
async def test_right_drafts_save_steps_and_wrong_ones_cost_none(
    backend: str, wrong: float, steps: tuple[int, int]
) -> None:
    """20 tokens, the first from the prefill worker; a step gives up to four, which lie in two blocks."""
    async with house("shared_memory", backend=backend, drafter=Knowing(wrong)) as made:
        gateway = Gateway(made)
        heard = gateway.start(made.decodes[0], made.prefills[0], work(("r", 1), PROMPT, 20))
        await heard.ended.wait()
        assert tuple(heard.tokens) == greedy(PROMPT, 20)
        assert steps[0] <= made.decodes[0].loop.steps <= steps[1]
        assert await made.empty() == []
        await gateway.close()


@pytest.mark.parametrize("place", range(1, 12))
async def test_a_stop_token_within_a_draft_ends_the_output(place: int) -> None:
    """A stop token, and the blocks that were published by then: who asks again reads the same."""
    truth = greedy(PROMPT, 12)
    stop = truth[place]
    async with house("shared_memory", drafter=Knowing(0.0)) as made:
        gateway = Gateway(made)
        for number in range(2):
            request = work((f"r{number}", 1), PROMPT, 40, stop=(stop,))
            heard = gateway.start(made.decodes[0], made.prefills[0], request)
            await heard.ended.wait()
            assert tuple(heard.tokens) == truth[: truth.index(stop) + 1]
        longer = (*PROMPT, *truth)
        heard = gateway.start(made.decodes[0], made.prefills[0], work(("longer", 1), longer, 8))
        await heard.ended.wait()
        assert tuple(heard.tokens) == greedy(longer, 8)
        assert await made.empty() == []
        await gateway.close()


class Failing:
    """Drafts what cannot be computed, more than was asked for, or nothing but an error."""

    def __init__(self, drafts: Sequence[int] | None) -> None:
        self._drafts = drafts

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        if self._drafts is None:
            raise ValueError("no draft")
        return [self._drafts] * len(sequences)

    def rests(self, sequence: DecodeSequence) -> bool:
        return False


@pytest.mark.parametrize("drafts", [None, [1] * 30, [VOCABULARY + 5], [-1]], ids=str)
async def test_a_failing_drafter_changes_no_token(backend: str, drafts: Sequence[int] | None) -> None:
    """A failed step is tried again without its drafts."""
    async with house("shared_memory", backend=backend, drafter=Failing(drafts)) as made:
        gateway = Gateway(made)
        requests = [work((f"r{number}", 1), (*PROMPT, number), 12) for number in range(3)]
        heard = [gateway.start(made.decodes[0], made.prefills[0], request) for request in requests]
        for number, one in enumerate(heard):
            await one.ended.wait()
            assert tuple(one.tokens) == greedy((*PROMPT, number), 12)
        assert await made.empty() == []
        await gateway.close()


class Silent(Failing):
    """A drafter that always rests."""

    def rests(self, sequence: DecodeSequence) -> bool:
        return True


@pytest.mark.parametrize(
    ("drafter", "following"), [(Silent([]), True), (Failing([]), False)], ids=["rests", "looks"]
)
async def test_steps_are_launched_ahead_while_the_drafter_rests(
    drafter: Failing, following: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[bool] = []
    launch = DecodeGraphs.launch

    def noting(self: DecodeGraphs, sequences: Sequence[SequenceStep], *rest: Any) -> Launched:
        followed.extend(step.follows is not None for step in sequences)
        return launch(self, sequences, *rest)

    monkeypatch.setattr(DecodeGraphs, "launch", noting)
    async with house("shared_memory", backend="device", drafter=drafter) as made:
        gateway = Gateway(made)
        heard = gateway.start(made.decodes[0], made.prefills[0], work(("r", 1), PROMPT, 20))
        await heard.ended.wait()
        await gateway.close()
    assert any(followed) == following


@pytest.mark.parametrize(
    "asked",
    [
        {"sampling": {"logprobs": 2}},
        {"sampling": {"frequency_penalty": 0.5}},
        {"sampling": {"logprobs": 1, "temperature": 0.9, "seed": 5, "presence_penalty": 0.3}},
        {"min_tokens": 6, "stop": tuple(range(0, VOCABULARY, 3))},
        {"sampling": {"temperature": 1.0, "seed": 3}, "choices": (0, 1, 2)},
    ],
    ids=["logprobs", "penalty", "sampled", "min_tokens", "n"],
)
async def test_rows_that_need_the_logits_are_drafted_for_and_get_the_same(
    backend: str, asked: dict[str, Any]
) -> None:
    """Tokens and scores with drafts are those without; the drafts follow the plain greedy text."""
    answers = []
    for drafter in (None, Knowing(0.2)):
        async with house("shared_memory", backend=backend, drafter=drafter) as made:
            gateway = Gateway(made)
            request = work(("r", 1), PROMPT, 24, **asked)
            heard = gateway.start(made.decodes[0], made.prefills[0], request)
            await heard.ended.wait()
            answers.append((heard.outputs, heard.reasons, _scores(heard, exact=backend == "native")))
            assert await made.empty() == []
            await gateway.close()
    assert drafter is not None
    assert drafter.drafted > 0
    assert answers[0] == answers[1]


def _scores(heard: Heard, *, exact: bool) -> list[Any]:
    """Return log-probabilities by token; rounded for backends whose sums depend on the step's rows."""
    scores = [score for of_choice in heard.scores.values() for score in of_choice]
    return [
        (s.rank, s.logprob if exact else round(s.logprob, 4), [t.token_id for t in s.top]) for s in scores
    ]


@pytest.mark.parametrize("backend", sampled(MODELS, ["native", "device"]))
async def test_greedy_requests_in_random_order(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_interleavings, "REQUESTS", 70)
    drafter = Knowing(0.3, resting=0.3)
    many = house("shared_memory", decodes=2, prefills=2, blocks=20, backend=backend, drafter=drafter)
    async with many as made:
        walk = test_random_interleavings.Walk(made, 3)
        await walk.run()
        assert await made.empty() == []
    assert complaints(caplog) == []
    finished = walk.outcomes["decode finished"]
    assert finished > 0, walk.outcomes
    assert drafter.drafted > finished  # on a slow machine fewer finish, and these still have drafts


@pytest.mark.parametrize("backend", sampled(MODELS, ["native", "device"]))
async def test_sampled_choices_and_beams_in_random_order(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sampled tokens are those without drafts, as the oracle of this walk has none."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_choices, "REQUESTS", 60)
    drafter = Knowing(0.3, resting=0.3)
    async with house("shared_memory", prefills=2, blocks=20, backend=backend, drafter=drafter) as made:
        walk = test_random_choices.Walk(made, 4)
        await walk.run()
        assert await made.empty() == []
        await walk.gateway.close()
    assert complaints(caplog) == []
    finished = walk.outcomes["decode finished"]
    assert finished > 10, walk.outcomes
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes
    assert drafter.drafted > finished
