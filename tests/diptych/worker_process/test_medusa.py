"""Medusa heads in the decode worker: the same tokens, whatever drafts are worth, in chains and trees."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from decode_worker.sequence import DecodeSequence
from diptych.engine.heads.medusa import MedusaHeads
from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker.v1 import work_pb2
from tests.diptych.worker_process import test_random_choices, test_random_interleavings
from tests.diptych.worker_process.both_workers import greedy, house
from tests.diptych.worker_process.medusa_heads import COUNT, PROMPT, heads_of, offline, plain
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.diptych.worker_process.test_draft_model import answered
from tests.diptych.worker_process.test_grammar_in_loops import GRAMMAR, alone, asked, grammars_of
from tests.diptych.worker_process.test_launched_ahead import complaints
from tests.forms import sampled

KINDS = ("right", "random", "first")
TREES = ("", "3,2,1", "dynamic:6,3,2")
SEEDED = {"temperature": 1.0, "seed": 11}
TEXT = plain(0.0, 0)
LATE = next(token for place, token in enumerate(TEXT) if place > 5 and token not in TEXT[:place])


@pytest.fixture(params=["native", "torch", "device"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("trees", TREES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("transport", "backend"),
    sampled(
        [("shared_memory", "native"), ("tcp", "native"), ("shared_memory", "torch"), ("tcp", "device")],
        [("shared_memory", "native"), ("tcp", "device")],
    ),
)
async def test_tokens_are_the_models_and_acceptance_is_what_an_offline_count_says(
    kind: str, trees: str, transport: str, sampling: dict[str, Any], backend: str
) -> None:
    temperature, seed = float(sampling.get("temperature", 0.0)), int(sampling.get("seed", 0))
    heads = heads_of(kind, temperature, seed)
    output, drafted, accepted = offline(heads, trees, temperature, seed)
    assert output == plain(temperature, seed)
    async with house(transport, heads=heads, trees=trees, backend=backend) as made:
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
    assert drafted > 0
    if kind == "right":  # all but the first step of two tokens, and the last one
        assert made.decodes[0].loop.steps < 2 * COUNT / 2
    assert (kind == "random") or accepted > 0


async def test_what_a_tree_decoded_is_cached_as_what_a_chain_would_have(backend: str) -> None:
    """Keys and values of right tokens are moved to the lanes of their positions before they are published."""
    heads = heads_of("first", 0.0, 0)
    async with house("shared_memory", heads=heads, trees="4,3,2", backend=backend, blocks=60) as made:
        gateway = Gateway(made)
        first = await answered(made, gateway, work(("a", 1), PROMPT, COUNT))
        assert tuple(first.tokens) == greedy(PROMPT, COUNT)
        longer = (*PROMPT, *first.tokens, 17, 3)
        second = await answered(made, gateway, work(("b", 1), longer, COUNT))
        assert tuple(second.tokens) == greedy(longer, COUNT)
        assert made.decodes[0].ended[-1].times.cached_tokens > len(PROMPT)
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("trees", TREES)
async def test_a_grammar_walks_down_every_branch(trees: str, backend: str) -> None:
    heads = heads_of("random", 0.0, 0)
    async with house("shared_memory", heads=heads, trees=trees, backend=backend) as made:
        grammars_of(made)
        gateway = Gateway(made)
        heard = await answered(made, gateway, asked(1, 24))
        assert tuple(heard.tokens) == alone(GRAMMAR.text, 24)
        assert made.decodes[0].ended[-1].drafted > 0
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": {"logprobs": 2}},
        {"sampling": {"frequency_penalty": 0.5, "logprobs": 1}},
        {"sampling": SEEDED, "choices": (0, 1, 2)},
        {"stop": (LATE,), "min_tokens": 3},
    ],
    ids=["logprobs", "penalty", "n", "stop"],
)
async def test_rows_with_rules_and_scores_have_those_of_no_drafts(options: dict[str, Any]) -> None:
    answers = []
    for heads in (None, heads_of("right", 0.0, 0)):
        async with house("shared_memory", heads=heads, trees="2,2,2", backend="native") as made:
            gateway = Gateway(made)
            heard = await answered(made, gateway, work(("r", 1), PROMPT, COUNT, **options))
            answers.append((heard.outputs, heard.reasons, heard.scores))
            await gateway.close()
            assert await made.empty() == []
    assert made.decodes[0].ended[-1].accepted > 0
    assert answers[0] == answers[1]


async def test_requests_in_random_order_with_preemptions_and_trees(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_interleavings, "REQUESTS", 40)
    many = house(
        "shared_memory",
        decodes=2,
        prefills=2,
        blocks=20,
        backend="native",
        heads=heads_of("first", 0.0, 0),
        trees="3,1",
    )
    async with many as made:
        walk = test_random_interleavings.Walk(made, 5)
        await walk.run()
        assert await made.empty() == []
        ended = [request for decode in made.decodes for request in decode.ended]
    assert complaints(caplog) == []
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes
    assert sum(one.drafted for one in ended) > 0


@pytest.mark.full
async def test_sampled_choices_and_beams_in_random_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_choices, "REQUESTS", 40)
    heads = heads_of("random", 0.0, 0)
    async with house("shared_memory", prefills=2, blocks=20, backend="native", heads=heads) as made:
        walk = test_random_choices.Walk(made, 6)
        await walk.run()
        assert await made.empty() == []
        await walk.gateway.close()
    assert complaints(caplog) == []


async def test_heads_that_fail_cost_drafts_and_no_request(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their logits are not finite, of another vocabulary, or do not come at all."""
    logits, calls = MedusaHeads.logits, iter(range(10_000))

    def broken(self: MedusaHeads, hidden: torch.Tensor, count: int) -> torch.Tensor:
        number = next(calls) % 9
        if number == 8:
            raise RuntimeError("no heads")
        found = logits(self, hidden, count)
        return found * torch.nan if number % 2 else torch.cat([found] * 2, dim=-1) + torch.arange(122)

    monkeypatch.setattr(MedusaHeads, "logits", broken)
    heads = heads_of("right", 0.0, 0)
    async with house("shared_memory", heads=heads, trees="2,1", backend=backend) as made:
        gateway = Gateway(made)
        for number in range(3):
            prompt = (*PROMPT, number)
            heard = await answered(made, gateway, work((f"r{number}", 1), prompt, COUNT))
            assert tuple(heard.tokens) == greedy(prompt, COUNT)
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("off", ["mask", "lanes"])
async def test_control_a_mask_or_a_lane_off_by_one_is_noticed(
    off: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls of the exactness above: right tokens that see a brother, or that stay in their lanes."""
    if off == "mask":

        def shifted(self: DecodeSequence) -> list[int]:
            return [-1, *(place for place in range(len(self.draft)))]

        monkeypatch.setattr(DecodeSequence, "_parents", shifted)
    else:
        monkeypatch.setattr(KVMemory, "move_lanes", lambda self, table, moves: None)
    heads = heads_of("right", 0.0, 0)
    async with house("shared_memory", heads=heads, trees="3,2,1", backend=backend) as made:
        gateway = Gateway(made)
        heard = await answered(made, gateway, work(("r", 1), PROMPT, COUNT))
        assert tuple(heard.tokens) != greedy(PROMPT, COUNT)
        await gateway.close()
