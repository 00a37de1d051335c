"""Recurrent layers on real loops of both workers: their states are handed off, cached, forked and counted.

The oracle computes each token from all before it and reads no state at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from decode_worker.window_rows import WindowRows
from diptych.engine.backends.torch.recurrent import step_states
from diptych.engine.backends.torch.recurrent.step_states import StepStates
from diptych.engine.batch import AbortWords
from diptych.engine.kv import state_groups as state_groups_module
from diptych.engine.kv import window_prefix
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.state_layout import StatePages
from diptych.runtime.block_hash import block_keys
from diptych.runtime.discovery.prefix_index import PrefixIndex, PrefixSnapshot
from diptych.runtime.discovery.records import Identity
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt
from tests.diptych.worker_process.both_workers import BLOCK, RECURRENT, VOCABULARY, House, greedy, house
from tests.diptych.worker_process.complaints import complaints
from tests.diptych.worker_process.scripted_gateway import Gateway, Heard, work
from tests.diptych.worker_process.test_random_interleavings import Plan, Walk

PROMPT = tuple((7 * n + 3) % VOCABULARY for n in range(42))
ANSWER = 14
BLOCKS = 120
TRANSPORTS = pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
LOCAL = pytest.mark.parametrize(
    "local", [work_pb2.LOCAL_PREFILL_UNSPECIFIED, work_pb2.LOCAL_PREFILL_FALLBACK]
)


def expected(prompt: Sequence[int], count: int = ANSWER) -> list[int]:
    return list(greedy(tuple(prompt), count, shape=RECURRENT))


async def ask(made: House, name: str, prompt: Sequence[int], count: int = ANSWER, **changes: Any) -> Heard:
    gateway = Gateway(made)
    message = work((name, 1), tuple(prompt), count, **changes)
    if message.local_prefill:
        heard = gateway.start_local(made.decodes[0], message)
    else:
        heard = gateway.start(made.decodes[0], made.prefills[0], message)
    async with asyncio.timeout(30):
        await heard.ended.wait()
    await asyncio.sleep(0)
    return heard


def expected_hit(made: House, prompt: Sequence[int]) -> int:
    """Return the cached tokens that a gateway expects of the decode worker, by the keys of its pool."""
    index, life, layout = PrefixIndex(), Identity(1, 1), made.decodes[0].memory.layout
    index.load(PrefixSnapshot("decode", life, 1, made.decodes[0].pool.cached_keys()))
    assert layout.windows is not None
    attempt = Attempt.from_work(work(("hit", 1), tuple(prompt), 1), max_context=256)
    keys = block_keys(attempt.cache_namespace, prompt, BLOCK)[: (len(prompt) - 1) // BLOCK]
    return index.usable_hits("decode", life, keys, layout.windows.kept(BLOCK) - 1) * BLOCK


def cached_tokens(made: House) -> int:
    return made.decodes[0].ended[-1].times.cached_tokens


def drop_pages(pool: BlockPool) -> int:
    """Evict the pages of a pool, as others that need room may; return how many blocks there were."""
    keys = list(pool._unlisted)
    return sum(pool._uncache(pool._cache.discard(key)) for key in keys)


def wrong(heard: Heard, prompt: Sequence[int]) -> bool:
    """Return whether a request failed, or got other tokens than the model's."""
    return heard.terminal_messages != ["decode finished"] or heard.tokens != expected(prompt)


# ---- the same tokens ---------------------------------------------------------------------------------------


@LOCAL
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 8 * BLOCK, 42])
async def test_answers_are_those_of_a_model_that_reads_no_state(length: int, local: int) -> None:
    """Prompts end at, before and behind a border of a place and of a chunk."""
    async with house("shared_memory", blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT) as made:
        heard = await ask(made, "a", PROMPT[:length], local=local)
        assert heard.tokens == expected(PROMPT[:length])
        assert await made.empty() == []


@TRANSPORTS
async def test_a_chat_goes_on_from_the_end_of_its_answer(transport: str) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT) as made:
        first = await ask(made, "a", PROMPT)
        assert first.tokens == expected(PROMPT)
        turn = (*PROMPT, *first.tokens, 5, 6, 7)
        assert (await ask(made, "b", turn)).tokens == expected(turn)
        end = len(PROMPT) if transport == "tcp" else len(PROMPT) + ANSWER - 1
        assert cached_tokens(made) == end // BLOCK * BLOCK
        hit = expected_hit(made, turn)
        assert (await ask(made, "c", turn)).tokens == expected(turn)
        assert cached_tokens(made) == hit == (len(turn) - 1) // BLOCK * BLOCK
        assert expected_hit(made, turn[:20]) == 0
        assert (await ask(made, "d", turn[:20])).tokens == expected(turn[:20])
        assert cached_tokens(made) == 0, "no states were kept in the middle of a prompt"
        assert await made.empty() == []


SYSTEM = PROMPT[:30]


def asking(number: int, tokens: int) -> tuple[int, ...]:
    return (*SYSTEM, *((number * n + 5) % VOCABULARY for n in range(tokens)))


@TRANSPORTS
@pytest.mark.parametrize("tokens", [10, 50])
async def test_what_two_prompts_begin_with_is_a_hit_for_the_third(transport: str, tokens: int) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT) as made:
        hits = []
        for number in (11, 13, 17, 19):
            heard = await ask(made, f"r{number}", asking(number, tokens))
            assert heard.tokens == expected(asking(number, tokens))
            hits.append(cached_tokens(made))
        assert hits == [0, 0, *[len(SYSTEM) // BLOCK * BLOCK] * 2]
        assert await made.empty() == []


async def test_a_short_ring_loses_what_prompts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without a longer ring the third prompt finds nothing."""
    monkeypatch.setattr(state_groups_module, "MOST_RINGS", 1)
    async with house("shared_memory", blocks=BLOCKS, shape=RECURRENT) as made:
        for number in (11, 13, 17):
            await ask(made, f"r{number}", asking(number, 50))
        assert cached_tokens(made) == 0


@TRANSPORTS
async def test_a_hit_whose_page_is_gone_is_none(transport: str) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT) as made:
        await ask(made, "a", PROMPT)
        assert expected_hit(made, PROMPT) == (len(PROMPT) - 1) // BLOCK * BLOCK
        assert drop_pages(made.decodes[0].pool) > 0
        drop_pages(made.prefills[0].scratch)
        assert expected_hit(made, PROMPT) == 0, "gateways expect what is granted"
        assert (await ask(made, "b", PROMPT)).tokens == expected(PROMPT)
        assert cached_tokens(made) == 0


async def test_to_take_such_a_hit_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""
    monkeypatch.setattr(window_prefix, "usable_places", lambda keys, end, reach, holds: end)
    async with house("shared_memory", blocks=BLOCKS, shape=RECURRENT) as made:
        await ask(made, "a", PROMPT)
        drop_pages(made.decodes[0].pool)
        assert wrong(await ask(made, "b", PROMPT), PROMPT)


@TRANSPORTS
async def test_choices_fork_the_states(transport: str) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT) as made:
        same = await ask(made, "a", PROMPT, choices=(0, 1, 2))
        assert [same.outputs[choice] for choice in range(3)] == [expected(PROMPT)] * 3
        assert await made.empty() == []


async def test_choices_that_share_a_page_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: three sequences of different tokens that leave their states in one page."""
    prompt, drawn = PROMPT[:41], {"choices": (0, 1, 2), "sampling": {"temperature": 1.5, "seed": 7}}
    found = []
    for shared in (False, False, True):
        if shared:
            monkeypatch.setattr(WindowRows, "own", lambda *rest: None)
        async with house("shared_memory", blocks=BLOCKS, shape=RECURRENT) as made:
            found.append((await ask(made, "a", prompt, **drawn)).outputs)
    assert len(set(map(tuple, found[0].values()))) == 3
    assert found[0] == found[1] != found[2]


@TRANSPORTS
async def test_beams_fork_the_states(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The found beams do not depend on the size of chunks, nor on who computes the prompt."""
    beams = {"choices": (0, 1, 2), "sampling": {"beam_width": 4}}
    outputs = []
    for chunk, local in ((8, 0), (64, 0), (8, work_pb2.LOCAL_PREFILL_FALLBACK)):
        async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT, chunk=chunk) as made:
            outputs.append((await ask(made, "b", PROMPT, local=local, **beams)).outputs)
            assert await made.empty() == []
    assert outputs[0] == outputs[1] == outputs[2]


# ---- controls: states of the wrong place, or advanced twice ------------------------------------------------


async def test_states_that_were_advanced_twice_make_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is computed twice, so that its tokens are in the states already: the second one fails."""
    real = StepStates.finish

    def twice(states: StepStates, abort: AbortWords | None) -> list[int]:
        return real(states, abort) + real(states, abort)

    monkeypatch.setattr(StepStates, "finish", twice)
    async with house("shared_memory", blocks=BLOCKS, shape=RECURRENT) as made:
        heard = await ask(made, "a", PROMPT)
        assert heard.terminal_messages != ["decode finished"]


@pytest.mark.parametrize("counted", [True, False])
async def test_the_page_of_another_place_is_wrong(monkeypatch: pytest.MonkeyPatch, counted: bool) -> None:
    """The count of tokens finds it; and where that is not asked for the tokens are others."""
    monkeypatch.setattr(
        step_states,
        "_page",
        lambda step, place: [t[max(place - step.window_first - 1, 0)] for t in step.window_tables],
    )
    if not counted:
        monkeypatch.setattr(
            StatePages, "counts", lambda pages, at: pages._read(at, 0, 8).view(torch.int64).squeeze(1) * 0 - 1
        )
        monkeypatch.setattr(step_states._Run, "stale", lambda run: [False] * len(run.members))
    async with house("shared_memory", blocks=BLOCKS, shape=RECURRENT) as made:
        heard = await ask(made, "a", PROMPT)
        assert wrong(heard, PROMPT)
        if counted:
            assert heard.terminal_messages != ["decode finished"]


# ---- requests in random order ------------------------------------------------------------------------------


class RecurrentWalk(Walk):
    """A walk over workers of a model with recurrent layers."""

    requests = 90

    def expected(self, planned: Plan) -> tuple[int, ...]:
        return greedy(planned.prompt, planned.max_tokens, shape=RECURRENT)


@pytest.mark.parametrize(
    ("transport", "seed", "blocks"),
    [
        ("shared_memory", 1, 56),
        pytest.param("tcp", 2, 56, marks=pytest.mark.full),
        pytest.param("shared_memory", 3, 48, marks=pytest.mark.full),
    ],
)
async def test_requests_in_random_order_leave_nothing_behind(
    transport: str, seed: int, blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with house(transport, decodes=2, prefills=2, blocks=blocks, scratch=90, shape=RECURRENT) as made:
        walk = RecurrentWalk(made, seed)
        await walk.run()
        assert await made.empty() == []
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 10, walk.outcomes
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes
