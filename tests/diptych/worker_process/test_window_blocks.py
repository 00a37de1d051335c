"""Layers with a window in blocks of their own, on real loops of both workers.

The tokens are those of one block for all layers, and what lies behind the window is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from decode_worker.prompt_lookup import PromptLookup
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv import window_groups as window_groups_module
from diptych.engine.kv import window_prefix
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.window_groups import WindowGroups, window_groups
from diptych.engine.loaded_model import Model
from diptych.engine.models.shape import LayerShape, ModelShape
from diptych.engine.runner import Runner
from diptych.worker.v1 import work_pb2
from tests.diptych.worker_process import both_workers
from tests.diptych.worker_process.both_workers import BLOCK, VOCABULARY, WINDOWED, house
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
)
from tests.kernels.cpu.tiny_models import weights_of

expected = partial(answer_of, WINDOWED)


# ---- the same tokens ---------------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("backend", ["torch", "native", "device"])
async def test_a_chat_goes_on_from_the_end_of_its_answer(transport: str, backend: str) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=WINDOWED, backend=backend) as made:
        await check_chat(made, WINDOWED, transport)


@TRANSPORTS
@pytest.mark.parametrize("tokens", [10, 50])
async def test_what_two_prompts_begin_with_is_a_hit_for_the_third(transport: str, tokens: int) -> None:
    """The longer prompts overwrite their rings, which have to be longer for it."""
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=WINDOWED) as made:
        await check_third_prompt(made, WINDOWED, tokens)


async def test_a_short_ring_loses_what_prompts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without a longer ring the third prompt finds nothing."""
    monkeypatch.setattr(window_groups_module, "MOST_RINGS", 1)
    async with house("shared_memory", blocks=BLOCKS, shape=WINDOWED) as made:
        await check_third_prompt_misses(made)


@TRANSPORTS
async def test_a_hit_whose_windowed_blocks_are_gone_is_none(transport: str) -> None:
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=WINDOWED) as made:
        await check_lost_hit(made, WINDOWED)


async def test_to_take_such_a_hit_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""
    monkeypatch.setattr(window_prefix, "usable_places", lambda keys, end, reach, holds: end)
    async with house("shared_memory", blocks=BLOCKS, shape=WINDOWED) as made:
        await check_lost_hit_shows(made, WINDOWED)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_choices_and_beams_copy_on_write(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beams = {"choices": (0, 1, 2), "sampling": {"beam_width": 4}}
    async with house(transport, blocks=BLOCKS, scratch=BLOCKS, shape=WINDOWED) as made:
        same = await ask(made, "a", PROMPT, choices=(0, 1, 2))
        assert [same.outputs[choice] for choice in range(3)] == [expected(PROMPT)] * 3
        searched = await ask(made, "b", PROMPT, **beams)
        assert await made.empty() == []
    monkeypatch.setattr(both_workers, "window_groups", lambda windows: None)
    async with house(transport, shape=WINDOWED) as plain:
        assert (await ask(plain, "b", PROMPT, **beams)).outputs == searched.outputs


@pytest.mark.parametrize("local", [work_pb2.LOCAL_PREFILL_UNSPECIFIED, work_pb2.LOCAL_PREFILL_FALLBACK])
async def test_drafts_and_local_prompts(local: work_pb2.LocalPrefill) -> None:
    prompt = PROMPT[:9] * 5
    async with house("shared_memory", blocks=BLOCKS, shape=WINDOWED, drafter=PromptLookup(3)) as made:
        heard = await ask(made, "a", prompt, 40, local=local)
        assert heard.tokens == expected(prompt, 40)
        assert made.decodes[0].ended[-1].drafted > 0
        assert await made.empty() == []


@pytest.mark.parametrize(
    ("transport", "seed", "blocks", "backend"),
    [
        ("shared_memory", 1, 64, "torch"),
        pytest.param("tcp", 2, 64, "torch", marks=pytest.mark.full),
        pytest.param("shared_memory", 3, 56, "native", marks=pytest.mark.full),
        pytest.param("tcp", 4, 56, "native", marks=pytest.mark.full),
        pytest.param("shared_memory", 5, 64, "device", marks=pytest.mark.full),
    ],
)
async def test_requests_in_random_order_leave_nothing_behind(
    transport: str, seed: int, blocks: int, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    await check_random_order(transport, WINDOWED, seed, blocks, caplog, backend)


# ---- memory ------------------------------------------------------------------------------------------------

LONG, WINDOW, CHUNK, STEPS = 8000, 64, 128, 40
LONG_SHAPE = replace(
    WINDOWED, max_context=8192, layers=tuple(LayerShape(window) for window in (WINDOW, None, WINDOW))
)
LONG_PROMPT = tuple((n * n // 7 + 3 * n) % VOCABULARY for n in range(LONG))


def plain_answer(shape: ModelShape) -> list[int]:
    """Return the answer to the long prompt with one block for all layers."""
    backend = NativeBackend(shape, weights_of(shape, torch.float32), torch.float32)
    runner = Runner(Model(shape, "fp32", torch.float32, backend, "native"), 1)
    layout = runner.model.kv_layout(16)
    memory = KVMemory(layout, layout.blocks_for(LONG + STEPS))
    tokens, start, output = LONG_PROMPT, 0, list[int]()
    while len(output) < STEPS:
        chunk = tokens[start : start + 500]
        step = SequenceStep(memory, range(memory.num_blocks), start, chunk, True)
        logits = runner.step([step])
        start += len(chunk)
        if start == len(tokens):
            output.append(int(logits[0].argmax()))
            tokens = (*tokens, output[-1])
    return output


class Held:
    """The windowed blocks that a pool's requests hold, at most, while steps run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.prompt = self.answer = 0
        self.pool: BlockPool | None = None
        real = Runner._check

        def check(runner: Runner, sequences: Sequence[SequenceStep], abort: Any) -> None:
            real(runner, sequences, abort)
            (step,) = sequences
            if self.pool is not None and step.window_tables:
                held = self.pool.total - self.pool.available()
                windowed = held - len(step.block_table)
                if len(step.token_ids) > 1:
                    self.prompt = max(self.prompt, windowed)
                else:
                    self.answer = max(self.answer, windowed)

        patch.setattr(Runner, "_check", check)


@TRANSPORTS
async def test_8000_tokens_hold_a_window_and_a_chunk(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = window_groups(LONG_SHAPE.windows)
    assert isinstance(groups, WindowGroups)
    async with house(
        transport, blocks=2300, scratch=2300, chunk=CHUNK, shape=LONG_SHAPE, backend="native"
    ) as made:
        answer, own = Held(monkeypatch), made.decodes[0].pool if transport == "shared_memory" else None
        answer.pool = own or made.prefills[0].scratch
        heard = await ask(made, "long", LONG_PROMPT, 1)
        answer.pool = made.decodes[0].pool
        more = await ask(made, "on", LONG_PROMPT, STEPS)
        assert await made.empty() == []
    assert more.tokens == plain_answer(LONG_SHAPE)
    assert heard.tokens == more.tokens[:1]
    one_chunk = groups.tables * (-(-(WINDOW + CHUNK) // BLOCK) + 2)
    assert 0 < answer.prompt <= one_chunk < groups.tables * LONG // BLOCK // 8
    ahead = 1  # full block of a step that is launched ahead of the one that is counted
    assert 0 < answer.answer <= groups.tables * (-(-WINDOW // BLOCK) + 2) + ahead
