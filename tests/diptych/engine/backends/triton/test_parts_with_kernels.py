"""A model's parts with the kernels themselves: views of some heads of a block, sums, experts that are dealt.

One process has all parts: the interpreter serves one thread at a time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.backends.triton.cuda_graph import EagerCapture
from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import lower_context
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.parallel.pipeline import ALONE
from diptych.engine.parallel.stages import deal_stages
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.part_weights import read_parts
from diptych.engine.weights.reader import OpenCheckpoint
from tests.adapters import write_adapter
from tests.diptych.engine.models import expert_models
from tests.diptych.engine.models.family_models import config_of, oracle_of, save
from tests.diptych.engine.parallel.thread_ranks import memory_of

PARTS, PROMPT, CONTEXT = 2, 6, 64


@pytest.fixture(params=["dense", "experts", "sent"])
def dealing(request: pytest.FixtureRequest) -> str:
    """Return what is dealt: a dense model, experts to which all rows go, or ones to which rows are sent."""
    return str(request.param)


@pytest.fixture
def opened(dealing: str, tmp_path: Path) -> OpenCheckpoint:
    """Three KV heads on two parts, or ten experts on two; a shared expert where rows are sent."""
    if dealing != "dense":
        expert_models.oracle_of("qwen2_moe" if dealing == "sent" else "mixtral").save_pretrained(tmp_path)
        return open_checkpoint(tmp_path, "fp32")
    return open_checkpoint(save(oracle_of(config_of("smollm3")), tmp_path), "fp32")


def backends(
    opened: OpenCheckpoint, device: torch.device, *, sent: bool = False
) -> tuple[PartsBackend, TritonPartsBackend]:
    shape = opened.shape
    parts = deal_parts(shape, PARTS, whole_experts=shape.experts is not None, all_to_all=sent)
    (stage,) = deal_stages(shape, 1)
    weights = read_parts(opened, parts, stage)
    by_torch = PartsBackend(shape, parts, weights, ALONE, stage, stop_word=StopWord(), threads=1)
    made = TritonPartsBackend(shape, parts, weights, ALONE, stage, stop_word=StopWord(), device=device)
    return by_torch, made


def text_of(opened: OpenCheckpoint, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, opened.shape.vocab_size, (tokens,), generator=generator).tolist()


def on(device: torch.device, opened: OpenCheckpoint, blocks: int = 4) -> KVMemory:
    memory = memory_of(opened.shape, blocks)
    return memory if device.type == "cpu" else KVMemory.on_device(memory.layout, blocks, device)


def test_steps_equal_those_of_torch(opened: OpenCheckpoint, dealing: str, device: torch.device) -> None:
    by_torch, made = backends(opened, device, sent=dealing == "sent")
    theirs, ours, text = memory_of(opened.shape, 4), on(device, opened), text_of(opened, PROMPT + 1)
    for begin, end in ((0, PROMPT), (PROMPT, PROMPT + 1)):
        steps = [[SequenceStep(memory, range(4), begin, text[begin:end], True)] for memory in (theirs, ours)]
        expected, got = by_torch.forward(steps[0], None), made.forward(steps[1], None)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(ours.data.cpu(), theirs.data, atol=2e-4, rtol=0)


@pytest.mark.full
def test_adapted_steps_equal_those_of_torch(tmp_path: Path, device: torch.device) -> None:
    """A prompt with an adapter, then a recorded step of it beside a row of the base, whose prompt was
    recorded.
    """
    oracle = oracle_of(config_of("smollm3"))
    whole = open_checkpoint(save(oracle, tmp_path / "model"), "fp32")
    opened = replace(whole, shape=lower_context(whole.shape, CONTEXT))
    by_torch, made = backends(opened, device)
    theirs, ours, text = memory_of(opened.shape, 8), on(device, opened, 8), text_of(opened, 5)
    adapter = read_adapter(write_adapter(tmp_path / "a", oracle, seed=1, layers=[0]), opened.shape, 4)
    for backend in (by_torch, made):
        assert backend.allow_adapters(1, 4) is None
        backend.set_adapter(0, backend.prepare_adapter(adapter))
    capture = EagerCapture() if device.type == "cpu" else None
    assert made.record_prompts(ours.layout, 8, capture) == 2
    assert made.plan_decode(2, 16, capture) == 2
    made.prepare_decode(ours)
    for rows, begin, end in (((None,), 0, 4), ((0,), 0, 4), ((None, 0), 4, 5)):
        steps = [
            [
                SequenceStep(memory, range(4 * (row or 0), 8), begin, text[begin:end], True, adapter=slot)
                for row, slot in enumerate(rows, start=0 if len(rows) > 1 else rows.count(0))
            ]
            for memory in (theirs, ours)
        ]
        assert made.launches(steps[1]) == (end == 5)
        expected, got = by_torch.forward(steps[0], None), made.forward(steps[1], None)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
    assert (got[1] - got[0]).abs().max() > 0.1, "the adapter should show"
    torch.testing.assert_close(ours.data.cpu(), theirs.data, atol=2e-4, rtol=0)


@pytest.mark.full
def test_recorded_prompt_and_decode_steps_equal_those_of_torch(tmp_path: Path, device: torch.device) -> None:
    whole = open_checkpoint(save(oracle_of(config_of("smollm3")), tmp_path), "fp32")
    opened = replace(whole, shape=lower_context(whole.shape, CONTEXT))
    by_torch, made = backends(opened, device)
    theirs, ours, text = memory_of(opened.shape, 4), on(device, opened), text_of(opened, 10)
    capture = EagerCapture() if device.type == "cpu" else None
    assert made.record_prompts(ours.layout, 16, capture, seconds=math.inf) == 2
    assert made.plan_decode(1, 16, capture) == 1
    made.prepare_decode(ours)
    for begin, end in ((0, 9), (9, 10)):
        steps = [[SequenceStep(memory, range(4), begin, text[begin:end], True)] for memory in (theirs, ours)]
        assert made.launches(steps[1]) == (end == 10)
        expected, got = by_torch.forward(steps[0], None), made.forward(steps[1], None)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(ours.data.cpu(), theirs.data, atol=2e-4, rtol=0)
