"""Heads over features (EAGLE, EAGLE-3, MTP) in both workers: the same tokens, whatever drafts are worth."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.engine.heads.feature_head import HeadStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker.v1 import work_pb2
from diptych.worker_process import eagle_chunks
from tests.diptych.worker_process import test_random_interleavings
from tests.diptych.worker_process.both_workers import VOCABULARY, greedy, house
from tests.diptych.worker_process.eagle_heads import Form, heads_of, offline
from tests.diptych.worker_process.medusa_heads import COUNT, PROMPT, plain
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.diptych.worker_process.test_draft_model import answered
from tests.diptych.worker_process.test_grammar_in_loops import GRAMMAR, alone, asked, grammars_of
from tests.diptych.worker_process.test_launched_ahead import complaints
from tests.forms import sampled

SEEDED = {"temperature": 1.0, "seed": 11}
BACKENDS, TRANSPORTS = ("native", "torch"), ("shared_memory", "tcp")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", ["right", "random", "first"])
@pytest.mark.parametrize(
    ("form", "transport", "backend"),
    sampled(
        [
            *(("eagle3", transport, backend) for transport in TRANSPORTS for backend in BACKENDS),
            ("eagle", "tcp", "native"),
            ("eagle", "shared_memory", "torch"),
            ("mtp", "shared_memory", "native"),
            ("mtp", "tcp", "torch"),
        ],
        [("eagle3", "shared_memory", "native"), ("eagle", "tcp", "native"), ("mtp", "tcp", "torch")],
    ),
)
async def test_tokens_are_the_models_and_acceptance_is_what_an_offline_count_says(
    kind: str, form: Form, transport: str, sampling: dict[str, Any], backend: str
) -> None:
    """The prompt goes in chunks: the last feature of one is read by the next."""
    temperature, seed = float(sampling.get("temperature", 0.0)), int(sampling.get("seed", 0))
    head = heads_of(kind, temperature, seed, form)
    output, drafted, accepted = offline(head, temperature, seed)
    assert output == plain(temperature, seed)
    async with house(transport, eagle=head, backend=backend) as made:
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
    assert (kind == "right") == (accepted == drafted)
    assert kind == "random" or accepted > 0


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", ["right", "random", "first"])
@pytest.mark.parametrize(
    ("form", "transport", "backend", "trees"),
    [
        ("eagle3", "tcp", "native", "3,2,1"),
        ("eagle", "shared_memory", "torch", "3,2,1"),
        ("eagle3", "tcp", "torch", "dynamic:9,4,3"),
        ("eagle", "shared_memory", "native", "dynamic:9,4,3"),
    ],
)
async def test_trees_draft_what_chains_of_each_branch_would(
    kind: str, form: Form, transport: str, sampling: dict[str, Any], backend: str, trees: str
) -> None:
    temperature, seed = float(sampling.get("temperature", 0.0)), int(sampling.get("seed", 0))
    head = heads_of(kind, temperature, seed, form)
    output, drafted, accepted = offline(head, temperature, seed, trees)
    assert output == plain(temperature, seed)
    async with house(transport, eagle=head, backend=backend, trees=trees) as made:
        gateway = Gateway(made)
        heard = await answered(made, gateway, work(("r", 1), PROMPT, COUNT, sampling=sampling))
        assert tuple(heard.tokens) == output
        ended = made.decodes[0].ended[-1]
        assert (ended.drafted, ended.accepted) == (drafted, accepted)
        await gateway.close()
        assert await made.empty() == []
    assert drafted > 0
    assert kind == "random" or accepted > 0


@pytest.mark.parametrize("trees", ["3,2,1", "dynamic:9,4,3"])
async def test_control_features_of_another_parent_are_noticed(
    trees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = heads_of("right", 0.0, 0, "eagle")
    _, drafted, accepted = offline(head, 0.0, 0, trees)
    step = head.step

    def rolled(memory: KVMemory, steps: Sequence[HeadStep]) -> torch.Tensor:
        return step(memory, [replace(one, features=one.features.roll(1, 0)) for one in steps])

    monkeypatch.setattr(head, "step", rolled)
    async with house("shared_memory", eagle=head, backend="native", trees=trees) as made:
        gateway = Gateway(made)
        heard = await answered(made, gateway, work(("r", 1), PROMPT, COUNT))
        assert tuple(heard.tokens) == greedy(PROMPT, COUNT)
        ended = made.decodes[0].ended[-1]
        assert (ended.drafted, ended.accepted) != (drafted, accepted)
        await gateway.close()


@pytest.mark.parametrize("form", ["eagle3", "mtp"])
async def test_a_second_turn_reads_cached_blocks_with_those_of_the_head(form: Form, backend: str) -> None:
    head = heads_of("first", 0.0, 0, form)
    async with house("tcp", eagle=head, backend=backend, blocks=60, scratch=60) as made:
        gateway = Gateway(made)
        first = await answered(made, gateway, work(("a", 1), PROMPT, COUNT))
        longer = (*PROMPT, *first.tokens, 17, 3)
        second = await answered(made, gateway, work(("b", 1), longer, COUNT))
        assert tuple(second.tokens) == greedy(longer, COUNT)
        turn = made.decodes[0].ended[-1]
        assert turn.times.cached_tokens > len(PROMPT)
        assert turn.drafted > 0
        await gateway.close()
        assert await made.empty() == []


async def test_a_grammar_walks_down_the_draft_and_choices_draft_each(backend: str) -> None:
    async with house("shared_memory", eagle=heads_of("random", 0.0, 0), backend=backend, blocks=80) as made:
        grammars_of(made)
        gateway = Gateway(made)
        heard = await answered(made, gateway, asked(1, 24))
        assert tuple(heard.tokens) == alone(GRAMMAR.text, 24)
        assert made.decodes[0].ended[-1].drafted > 0
        await answered(made, gateway, work(("n", 1), PROMPT, COUNT, sampling=SEEDED, choices=(0, 1, 2)))
        several = await answered(
            made, gateway, work(("m", 1), PROMPT, COUNT, sampling=SEEDED, choices=(0, 1, 2))
        )
        await gateway.close()
    async with house("shared_memory", backend=backend, blocks=80) as made:
        gateway = Gateway(made)
        plainly = await answered(
            made, gateway, work(("n", 1), PROMPT, COUNT, sampling=SEEDED, choices=(0, 1, 2))
        )
        assert several.outputs == plainly.outputs
        await gateway.close()


async def test_requests_in_random_order_with_preemptions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_interleavings, "REQUESTS", 40)
    head = heads_of("first", 0.0, 0)
    many = house("tcp", decodes=2, prefills=2, blocks=20, backend="native", eagle=head)
    async with many as made:
        walk = test_random_interleavings.Walk(made, 5)
        await walk.run()
        assert await made.empty() == []
        ended = [request for decode in made.decodes for request in decode.ended]
    assert complaints(caplog) == []
    assert sum(one.drafted for one in ended) > 0


@pytest.mark.parametrize("form", ["eagle3", "mtp"])
async def test_a_head_that_fails_or_lies_costs_drafts_and_no_request(
    form: Form, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails in the prompts of the prefill worker and in drafts, whose logits are of another vocabulary, or
    not finite, or do not come.
    """
    head = heads_of("random", 0.0, 0, form)
    logits, calls = head.logits, iter(range(10_000))

    def failing(features: torch.Tensor) -> torch.Tensor:
        match next(calls) % 5:
            case 4:
                raise RuntimeError("no head")
            case 3:
                return torch.cat([logits(features)] * 2, dim=-1) + torch.arange(2 * VOCABULARY)
            case 2:
                return logits(features) * torch.nan
        return logits(features)

    def broken(self: Any, chunks: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(head, "logits", failing)
    monkeypatch.setattr(eagle_chunks.EagleChunks, "_compute", broken)
    async with house("shared_memory", eagle=head, backend=backend) as made:
        gateway = Gateway(made)
        for number in range(3):
            prompt = (*PROMPT, number)
            heard = await answered(made, gateway, work((f"r{number}", 1), prompt, COUNT))
            assert tuple(heard.tokens) == greedy(prompt, COUNT)
        await gateway.close()
        assert await made.empty() == []


@pytest.mark.parametrize("form", ["eagle3", "eagle"])
async def test_control_features_of_the_wrong_token_are_noticed(
    form: Form, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the offline count: features go with the token after theirs, in prompts, too."""
    head = heads_of("right", 0.0, 0, form)
    _, drafted, accepted = offline(head, 0.0, 0)
    fuse = head.fuse
    monkeypatch.setattr(head, "fuse", lambda features: fuse(features.roll(1, 0)))
    async with house("shared_memory", eagle=head, backend=backend) as made:
        gateway = Gateway(made)
        heard = await answered(made, gateway, work(("r", 1), PROMPT, COUNT))
        assert tuple(heard.tokens) == greedy(PROMPT, COUNT)
        ended = made.decodes[0].ended[-1]
        assert (ended.drafted, ended.accepted) != (drafted, accepted)
        await gateway.close()
