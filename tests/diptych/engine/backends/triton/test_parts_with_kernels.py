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
from tests.diptych.engine.models import expert_models
from tests.diptych.engine.models.family_models import config_of, oracle_of, save
from tests.diptych.engine.parallel.thread_ranks import memory_of

PARTS, PROMPT, CONTEXT = 2, 6, 64


@pytest.fixture(params=["dense", "experts"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> OpenCheckpoint:
    """Three KV heads on two parts, or ten experts on two."""
    if request.param == "experts":
        expert_models.oracle_of("mixtral").save_pretrained(tmp_path)
        return open_checkpoint(tmp_path, "fp32")
    return open_checkpoint(save(oracle_of(config_of("smollm3")), tmp_path), "fp32")


def backends(opened: OpenCheckpoint, device: torch.device) -> tuple[PartsBackend, TritonPartsBackend]:
    shape = opened.shape
    parts = deal_parts(shape, PARTS, whole_experts=shape.experts is not None)
    (stage,) = deal_stages(shape, 1)
    weights = read_parts(opened, parts, stage)
    by_torch = PartsBackend(shape, parts, weights, ALONE, stage, stop_word=StopWord(), threads=1)
    made = TritonPartsBackend(shape, parts, weights, ALONE, stage, stop_word=StopWord(), device=device)
    return by_torch, made


def text_of(opened: OpenCheckpoint, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, opened.shape.vocab_size, (tokens,), generator=generator).tolist()


def on(device: torch.device, opened: OpenCheckpoint) -> KVMemory:
    memory = memory_of(opened.shape, 4)
    return memory if device.type == "cpu" else KVMemory.on_device(memory.layout, 4, device)


def test_steps_equal_those_of_torch(opened: OpenCheckpoint, device: torch.device) -> None:
    by_torch, made = backends(opened, device)
    theirs, ours, text = memory_of(opened.shape, 4), on(device, opened), text_of(opened, PROMPT + 1)
    for begin, end in ((0, PROMPT), (PROMPT, PROMPT + 1)):
        steps = [[SequenceStep(memory, range(4), begin, text[begin:end], True)] for memory in (theirs, ours)]
        expected, got = by_torch.forward(steps[0], None), made.forward(steps[1], None)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
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
