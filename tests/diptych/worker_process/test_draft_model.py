"""A draft model beside the model: the same tokens, whatever its drafts are worth."""

from __future__ import annotations

import logging
from functools import cache
from itertools import product
from typing import Any

import pytest

from decode_worker.speculation import Speculation
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams, sample
from diptych.worker.v1 import work_pb2
from diptych.worker_process import draft_chunks
from tests.diptych.worker_process import test_random_choices, test_random_interleavings
from tests.diptych.worker_process.both_workers import BLOCK, draft_model, greedy, house, model
from tests.diptych.worker_process.scripted_gateway import Gateway, Heard, work
from tests.diptych.worker_process.test_grammar_in_loops import GRAMMAR, alone, asked, grammars_of
from tests.diptych.worker_process.test_launched_ahead import complaints
from tests.forms import sampled

PROMPT = (5, 9, 2, 33, 7, 18, 4, 40, 22, 1, 13)
COUNT = 40
GRAMMAR_TOKENS = 24
KINDS = ("same", "random", "first")
PLACES = sampled(
    product(["shared_memory", "tcp"], ["native", "torch"]), [("shared_memory", "native"), ("tcp", "torch")]
)
MOST = 3
"""Drafted tokens of a sequence in a step (both_workers.py)."""


@cache
def tokens_of(kind: str | None, context: tuple[int, ...], temperature: float, seed: int, said: int) -> int:
    """Return the token that a model draws after `context`, of which `said` tokens are output."""
    chosen = model() if kind is None else draft_model(kind, "torch")
    blocks = chosen.kv_layout(BLOCK).blocks_for(len(context))
    memory = KVMemory(chosen.kv_layout(BLOCK), blocks)
    logits = Runner(chosen, 1).step([SequenceStep(memory, range(blocks), 0, context, wants_logits=True)])
    prompt = len(context) - said
    row = SampleRow(SamplingParams(temperature=temperature, seed=seed), context[:prompt], context[prompt:])
    (sampled,) = sample(logits, [row])
    assert isinstance(sampled, Sampled)
    return sampled.token_id


def offline(kind: str, temperature: float, seed: int, count: int) -> tuple[tuple[int, ...], int, int]:
    """Return the model's output, and how many tokens were drafted and accepted: by the definition alone."""
    draw = lambda of, text: tokens_of(of, text, temperature, seed, len(text) - len(PROMPT))  # noqa: E731
    text, drafted, accepted = (*PROMPT, draw(None, PROMPT)), 0, 0
    while (left := count - (len(text) - len(PROMPT))) > 0:
        draft: tuple[int, ...] = ()
        for _ in range(min(MOST, left - 1)):
            draft += (draw(kind, text + draft),)
        drafted += len(draft)
        for token in (*draft, None):
            said = draw(None, text)
            text += (said,)
            if said != token:
                break
            accepted += 1
    return text[len(PROMPT) :], drafted, accepted


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def answered(made: Any, gateway: Gateway, message: work_pb2.Work, local: bool = False) -> Heard:
    decode = made.decodes[0]
    heard = (
        gateway.start_local(decode, message) if local else gateway.start(decode, made.prefills[0], message)
    )
    await heard.ended.wait()
    return heard


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("transport", "backend"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_the_models_and_acceptance_is_what_an_offline_count_says(
    kind: str, transport: str, sampling: dict[str, Any], backend: str
) -> None:
    temperature, seed = float(sampling.get("temperature", 0.0)), int(sampling.get("seed", 0))
    output, drafted, accepted = offline(kind, temperature, seed, COUNT)
    async with house(transport, draft=kind, backend=backend) as made:
        gateway = Gateway(made)
        for local in (False, True):
            message = work((f"r{local}", 1), PROMPT, COUNT, sampling=sampling, cache_read=False)
            message.local_prefill = work_pb2.LOCAL_PREFILL_FALLBACK * local
            heard = await answered(made, gateway, message, local)
            assert tuple(heard.tokens) == output
            ended = made.decodes[0].ended[-1]
            assert (ended.drafted, ended.accepted) == (drafted, accepted)
        await gateway.close()
        assert await made.empty() == []
    assert (kind == "same") == (accepted == drafted)
    if not temperature:
        assert output == greedy(PROMPT, COUNT)


@pytest.mark.parametrize(("transport", "backend"), PLACES)
async def test_cached_prefixes_have_the_draft_models_keys_and_values(transport: str, backend: str) -> None:
    """A second turn reads the blocks that the first decoded; all drafts by the model itself stay right."""
    async with house(transport, draft="same", backend=backend, blocks=60, scratch=60) as made:
        gateway = Gateway(made)
        first = await answered(made, gateway, work(("a", 1), PROMPT, COUNT))
        longer = (*PROMPT, *first.tokens, 17, 3)
        second = await answered(made, gateway, work(("b", 1), longer, COUNT))
        assert tuple(second.tokens) == greedy(longer, COUNT)
        turn = made.decodes[0].ended[-1]
        assert turn.times.cached_tokens > len(PROMPT)
        assert 0 < turn.drafted == turn.accepted
        await gateway.close()
        assert await made.empty() == []


async def test_choices_of_one_prompt_draft_each_in_their_own_blocks(backend: str) -> None:
    answers = []
    for draft in (None, "same", "first"):
        async with house("shared_memory", draft=draft, backend=backend, blocks=80) as made:
            gateway = Gateway(made)
            sampling = {"temperature": 1.0, "seed": 4}
            heard = await answered(
                made, gateway, work(("r", 1), PROMPT, 24, sampling=sampling, choices=(0, 1, 2))
            )
            answers.append(heard.outputs)
            ended = made.decodes[0].ended[-1]
            assert (ended.drafted > 0) == (draft is not None)
            assert draft != "same" or ended.drafted == ended.accepted
            await gateway.close()
            assert await made.empty() == []
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("tcp", marks=pytest.mark.full)])
async def test_requests_in_random_order_with_preemptions(
    transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafts take no block that a request needs: few blocks, cancels, two workers of each kind."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_interleavings, "REQUESTS", 50)
    many = house(transport, decodes=2, prefills=2, blocks=20, backend="native", draft="first")
    async with many as made:
        walk = test_random_interleavings.Walk(made, 5)
        await walk.run()
        assert await made.empty() == []
        ended = [request for decode in made.decodes for request in decode.ended]
    assert complaints(caplog) == []
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes
    assert 0 < sum(one.accepted for one in ended) < sum(one.drafted for one in ended)


async def test_sampled_choices_and_beams_in_random_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_choices, "REQUESTS", 40)
    async with house("shared_memory", prefills=2, blocks=20, backend="native", draft="first") as made:
        walk = test_random_choices.Walk(made, 6)
        await walk.run()
        assert await made.empty() == []
        await walk.gateway.close()
        assert sum(one.drafted for one in made.decodes[0].ended) > 0
    assert complaints(caplog) == []


@pytest.mark.parametrize("draft", ["same", "random"])
async def test_a_grammar_walks_down_the_draft(draft: str, backend: str) -> None:
    """Masks at each drafted position; the output is that of the model alone under the grammar."""
    async with house("shared_memory", draft=draft, backend=backend) as made:
        grammars_of(made)
        gateway = Gateway(made)
        heard = await answered(made, gateway, asked(1, GRAMMAR_TOKENS))
        assert tuple(heard.tokens) == alone(GRAMMAR.text, GRAMMAR_TOKENS)
        ended = made.decodes[0].ended[-1]
        assert ended.drafted > 0
        assert draft != "same" or ended.drafted == ended.accepted
        await gateway.close()
        assert await made.empty() == []


async def test_a_draft_model_that_fails_costs_drafts_and_no_request(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails in the prompts of the prefill worker and in drafts; one that lies about its length is cut."""
    expected = [greedy((*PROMPT, number), 20) for number in range(4)]
    lengths = iter(range(10_000))

    def broken(step: SequenceStep) -> SequenceStep:
        raise RuntimeError("broken")

    step_and_sample = Runner.step_and_sample

    async with house("shared_memory", draft="same", backend=backend) as made:
        mine = made.decodes[0].loop._pipeline._runner

        def failing(self: Runner, *rest: Any) -> Any:
            if self is not mine and self is not made.prefills[0].loop._runner and next(lengths) % 3 == 1:
                raise RuntimeError("no draft")
            return step_and_sample(self, *rest)

        monkeypatch.setattr(Runner, "step_and_sample", failing)
        monkeypatch.setattr(draft_chunks, "draft_step", broken)
        gateway = Gateway(made)
        for number in range(4):
            prompt = (*PROMPT, number)
            heard = await answered(made, gateway, work((f"r{number}", 1), prompt, 20))
            assert tuple(heard.tokens) == expected[number]
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("off", ["position", "kept"])
async def test_control_a_verification_off_by_one_is_noticed(
    off: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls of the exactness above: a draft computed one lane too late, or one wrong token kept."""
    if off == "position":
        from decode_worker.sequence import DecodeSequence

        step = DecodeSequence.step

        def late(self: DecodeSequence, memory: KVMemory, follows: int | None) -> SequenceStep:
            made = step(self, memory, follows)
            if self.draft:
                from dataclasses import replace

                made = replace(made, start=made.start - 1)
            return made

        monkeypatch.setattr(DecodeSequence, "step", late)
    else:
        from decode_worker.choices import Choice

        take = Choice._take_drafted

        def kept(self: Choice, found: Any) -> Any:
            draft = self.rows[0].draft
            if len(draft) > 1 and len(found) > 1:
                found = [Sampled(draft[0]), *found[1:]]
            return take(self, found)

        monkeypatch.setattr(Choice, "_take_drafted", kept)
    async with house("shared_memory", draft="first", backend=backend) as made:
        gateway = Gateway(made)
        heard = await answered(made, gateway, work(("r", 1), PROMPT, COUNT))
        assert tuple(heard.tokens) != greedy(PROMPT, COUNT)
        await gateway.close()


def test_speculation_without_room_drafts_nothing() -> None:
    speculation = Speculation(None, most=3, tokens=4)  # type: ignore[arg-type]
    assert [speculation._room(rows) for rows in (1, 2, 3, 4, 9)] == [3, 1, 0, 0, 0]
