"""Recurrent layers in the native step on real loops of both workers: handed off, cached, forked, preempted.

The oracle computes each token from all before it in torch, and reads no state at all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.worker.v1 import work_pb2
from tests.diptych.worker_process.both_workers import BLOCK, RECURRENT, house
from tests.diptych.worker_process.page_checks import (
    BLOCKS,
    PROMPT,
    TRANSPORTS,
    answer_of,
    ask,
    check_chat,
    check_lost_hit,
    check_random_order,
    check_third_prompt,
)

LOCAL = work_pb2.LOCAL_PREFILL_FALLBACK


@TRANSPORTS
async def test_a_chat_goes_on_from_the_end_of_its_answer(transport: str) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT, backend="native") as made:
        await check_chat(made, RECURRENT, transport)
        for length in (1, BLOCK, 8 * BLOCK):
            heard = await ask(made, f"local-{length}", PROMPT[:length], local=LOCAL)
            assert heard.tokens == answer_of(RECURRENT, PROMPT[:length])


@TRANSPORTS
async def test_what_prompts_share_is_a_hit_and_is_none_without_its_page(transport: str) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT, backend="native") as made:
        await check_third_prompt(made, RECURRENT, 50)
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=RECURRENT, backend="native") as made:
        await check_lost_hit(made, RECURRENT)


async def test_choices_and_beams_fork_the_states() -> None:
    drawn = {"choices": (0, 1, 2), "sampling": {"temperature": 1.5, "seed": 7}}
    beams = {"choices": (0, 1, 2), "sampling": {"beam_width": 4}}
    found = []
    for backend in ("native", "torch"):
        async with house("shared_memory", blocks=BLOCKS, shape=RECURRENT, backend=backend) as made:
            same = await ask(made, "a", PROMPT, choices=(0, 1, 2))
            assert [same.outputs[choice] for choice in range(3)] == [answer_of(RECURRENT, PROMPT)] * 3
            forked = [await ask(made, name, PROMPT, **asked) for name, asked in (("b", drawn), ("c", beams))]
            found.append([heard.outputs for heard in forked])
            assert await made.empty() == []
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0][0].values()))) == 3


async def test_a_page_of_another_place_makes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the step finds that the states are not those before its tokens, and the request fails."""
    real = NativeBackend.forward_stage

    def turned(
        backend: NativeBackend,
        sequences: list[SequenceStep],
        greedy: bytes,
        abort: AbortWords | None,
    ) -> tuple[torch.Tensor, object]:
        other = [
            replace(step, window_tables=tuple([*table[1:], table[0]] for table in step.window_tables))
            for step in sequences
        ]
        return real(backend, other, greedy, abort)

    monkeypatch.setattr(NativeBackend, "forward_stage", turned)
    async with house("shared_memory", blocks=BLOCKS, shape=RECURRENT, backend="native") as made:
        heard = await ask(made, "a", PROMPT)
        assert heard.terminal_messages != ["decode finished"]


@pytest.mark.full
@pytest.mark.parametrize(("transport", "seed"), [("shared_memory", 1), ("tcp", 2)])
async def test_requests_in_random_order_leave_nothing_behind(
    transport: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    await check_random_order(transport, RECURRENT, seed, 56, caplog, backend="native")
