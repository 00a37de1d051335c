"""Recurrent layers on real loops of both workers: their states are handed off, cached, forked and counted.

The oracle computes each token from all before it and reads no state at all.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from decode_worker.window_rows import WindowRows
from diptych.engine.backends.torch.recurrent import step_states
from diptych.engine.backends.torch.recurrent.step_states import StepStates
from diptych.engine.batch import AbortWords
from diptych.engine.kv import state_groups as state_groups_module
from diptych.engine.kv import window_prefix
from diptych.engine.kv.state_layout import StatePages
from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.grants import Allocation
from kvtransfer.protocol.messages import PendingTransfer
from kvtransfer.protocol.window_allocator import WindowAllocator
from tests.diptych.worker_process.both_workers import BLOCK, RECURRENT, house
from tests.diptych.worker_process.page_checks import (
    BLOCKS,
    PROMPT,
    TRANSPORTS,
    answer_of,
    ask,
    check_chat,
    check_lost_hit,
    check_lost_hit_shows,
    check_random_order,
    check_third_prompt,
    check_third_prompt_misses,
    is_wrong,
)

LOCAL = pytest.mark.parametrize(
    "local", [work_pb2.LOCAL_PREFILL_UNSPECIFIED, work_pb2.LOCAL_PREFILL_FALLBACK]
)

expected = partial(answer_of, RECURRENT)
wrong = partial(is_wrong, RECURRENT)


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
        await check_chat(made, RECURRENT, transport)


@TRANSPORTS
@pytest.mark.parametrize("tokens", [10, 50])
async def test_what_two_prompts_begin_with_is_a_hit_for_the_third(transport: str, tokens: int) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT) as made:
        await check_third_prompt(made, RECURRENT, tokens)


async def test_a_prompt_that_parts_from_another_holds_one_page_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of prompts of 80 tokens in places of four: the second parts from the first behind 30."""
    held: list[tuple[int, int]] = []
    allocate = WindowAllocator.allocate

    def noting(self: WindowAllocator, pending: PendingTransfer, chunk: int) -> Allocation | None:
        found = allocate(self, pending, chunk)
        if found is not None:
            held.append((len(set(found.ring)), len(found.ring)))
        return found

    monkeypatch.setattr(WindowAllocator, "allocate", noting)
    async with house("shared_memory", blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT) as made:
        await check_third_prompt(made, RECURRENT, 50)
        layout = made.decodes[0].memory.layout
    pages = [(own // layout.windows.tables, all_ // layout.windows.tables) for own, all_ in held]
    assert pages == [(2, 2), (3, 14), (2, 2), (2, 2)], "with a page an entry it would hold 14"


async def test_a_short_ring_loses_what_prompts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without a page more the third prompt finds nothing."""
    monkeypatch.setattr(state_groups_module, "PARTING_PAGES", 0)
    async with house("shared_memory", blocks=BLOCKS, shape=RECURRENT) as made:
        await check_third_prompt_misses(made)


@TRANSPORTS
async def test_a_hit_whose_page_is_gone_is_none(transport: str) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT) as made:
        await check_lost_hit(made, RECURRENT)


async def test_to_take_such_a_hit_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""
    monkeypatch.setattr(window_prefix, "usable_places", lambda keys, end, reach, holds: end)
    async with house("shared_memory", blocks=BLOCKS, shape=RECURRENT) as made:
        await check_lost_hit_shows(made, RECURRENT)


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
    await check_random_order(transport, RECURRENT, seed, blocks, caplog)
