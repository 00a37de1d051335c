"""Keys and values in int8 through both workers: tokens are those of the model alone with such a cache, over
both transports, with prefixes, copies on write, preemptions and lost gateways; swapped scales are caught by
digests alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model
from diptych.engine.models.shape import ModelShape
from kernels.int8_cache import DTYPE
from kernels.kv_blocks import token_views
from tests.diptych.worker_process import (
    both_workers,
    oracle,
    test_pulled_prefixes,
    test_random_choices,
    test_random_interleavings,
)
from tests.diptych.worker_process.both_workers import SHAPE, house
from tests.diptych.worker_process.complaints import complaints
from tests.kernels.cpu.tiny_models import weights_of

patient = test_pulled_prefixes.patient


def int8_model(shape: ModelShape | None = None) -> Model:
    """Return the model of both workers, with such a cache; of no other `shape`."""
    assert shape is None
    backend = NativeBackend(SHAPE, weights_of(SHAPE, torch.float32), torch.float32, kept=DTYPE)
    return Model(SHAPE, "fp32", DTYPE, backend, "native")


@pytest.fixture(autouse=True)
def int8_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give both workers, and whoever says what is right, this model."""
    alone = int8_model()
    monkeypatch.setattr(both_workers, "model", lambda shape=None: alone)
    monkeypatch.setattr(oracle, "model", lambda shape=None: alone)
    for name in ("torch", "native"):
        monkeypatch.setitem(both_workers.MODELS, name, int8_model)
    told_by_the_model = (
        both_workers.greedy,
        oracle._engine,
        test_random_choices.answers,
        test_random_choices.beams,
    )
    for cached in told_by_the_model:
        cached.cache_clear()
    yield
    for cached in told_by_the_model:
        cached.cache_clear()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_greedy_outputs_in_random_order_are_those_of_the_model_alone(
    transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_interleavings, "REQUESTS", 60)
    async with house(transport, decodes=2, prefills=2, blocks=20, backend="native") as made:
        walk = test_random_interleavings.Walk(made, 3)
        await walk.run()
        assert await made.empty() == []
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 0, walk.outcomes


async def test_choices_and_beams_that_share_blocks_are_those_of_the_model_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_choices, "REQUESTS", 30)
    async with house("shared_memory", prefills=2, blocks=20, backend="native") as made:
        walk = test_random_choices.Walk(made, 4)
        await walk.run()
        assert await made.empty() == []
        await walk.gateway.close()
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 5, walk.outcomes
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes


@pytest.mark.usefixtures("patient")
async def test_a_second_turn_computes_only_what_is_new() -> None:
    await test_pulled_prefixes.test_second_turn_of_a_chat_computes_only_what_is_new()


@pytest.mark.usefixtures("patient")
async def test_swapped_scales_are_caught_by_digests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap_scales(payload: Any) -> memoryview:
        block = KVMemory(both_workers.layout(), 1, memoryview(bytearray(payload)))
        _, key_scales, _, value_scales = token_views(block.data, SHAPE.head_dim)
        held = key_scales.clone()
        key_scales.copy_(value_scales * 3)
        value_scales.copy_(held)
        return memoryview(block.block_bytes(0).tobytes())

    prompt, answer = test_pulled_prefixes.PROMPT, 18
    second = (*prompt, *both_workers.greedy(prompt, answer), 7, 5, 3)
    outputs = await test_pulled_prefixes.outputs_of_damaged_pulls(monkeypatch, swap_scales, answer, second)
    assert outputs[0] == both_workers.greedy(second, 6)
    assert outputs[1] != both_workers.greedy(second, 6)
