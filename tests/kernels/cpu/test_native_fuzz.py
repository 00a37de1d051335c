"""Random shapes, block tables, batches and threads: right against torch, and no byte outside of the blocks
that were given.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.models.shape import ExpertsShape, ModelShape, NormPlacement, QKNorm, Routing
from kernels.cpu import library as native
from kernels.quantised_linear import BLOCK_BYTES, BlockFormat
from tests.kernels.cpu.tiny_models import (
    Pool,
    block_weights_of,
    byte_weights_of,
    coded_weights_of,
    layout_of,
    shape_of,
    tokens_of,
    weights_of,
)


@st.composite
def shapes(draw: st.DrawFn, widest: int = 70) -> ModelShape:
    kv_heads = draw(st.integers(1, 3))
    layers = draw(st.integers(1, 2))
    window = st.one_of(st.none(), st.integers(1, 40))
    return shape_of(
        vocab_size=draw(st.integers(1, 70)),
        hidden_size=draw(st.integers(1, widest)),
        intermediate_size=draw(st.integers(1, widest)),
        num_layers=layers,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 14)),
        head_dim=2 * draw(st.integers(1, 36)),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "head"])),
        windows=tuple(draw(st.lists(window, min_size=layers, max_size=layers))),
    )


@st.composite
def switched_shapes(draw: st.DrawFn) -> ModelShape:
    """Shapes with any of the switches, experts among them."""
    plain = draw(shapes())
    experts = None
    if draw(st.booleans()):
        count = draw(st.integers(1, 6))
        shared = draw(st.sampled_from([0, 0, 33]))
        experts = ExpertsShape(
            num_experts=count,
            experts_per_token=draw(st.integers(1, count)),
            intermediate_size=draw(st.integers(1, 70)),
            routing=draw(st.sampled_from(get_args(Routing))),
            normalise=draw(st.booleans()),
            shared_size=shared,
            shared_gate=shared > 0 and draw(st.booleans()),
        )
    layers = [
        replace(
            layer,
            rotation=draw(st.sampled_from([0, None])),
            experts=experts is not None and draw(st.booleans()),
        )
        for layer in plain.layers
    ]
    return replace(
        plain,
        layers=tuple(layers),
        experts=experts,
        norms=draw(st.sampled_from(get_args(NormPlacement))),
        qk_norm=draw(st.sampled_from(get_args(QKNorm))),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu2"])),
        gated=experts is not None or draw(st.booleans()),
        sinks=draw(st.booleans()),
        score_cap=draw(st.sampled_from([None, 2.0])),
        logit_cap=draw(st.sampled_from([None, 5.0])),
        residual_scale=draw(st.sampled_from([1.0, 0.4])),
    )


Plan = list[list[tuple[int, list[int]]]]
"""Steps; each a list of sequence and the tokens that it gets."""
LIMIT = 60  # tokens a sequence


def random_plan(shape: ModelShape, seed: int) -> Plan:
    """Chunks of every sequence that has room, in random order, for some steps."""
    chooser = random.Random(seed)
    lengths = [0] * chooser.choice([1, 2, 5])
    plan: Plan = []
    for step in range(4):
        chunks = []
        for sequence, length in enumerate(lengths):
            count = min(LIMIT - length, chooser.choice([1, 1, 2, 13, 33]))
            if count > 0:
                chunks.append((sequence, tokens_of(count, shape.vocab_size, seed + step)))
                lengths[sequence] += count
        chooser.shuffle(chunks)
        plan.append(chunks)
    return [chunks for chunks in plan if chunks]


def run(backend: Any, plan: Plan, layout: KVLayout, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all steps, and the whole memory after them."""
    pool = Pool(layout, 300, seed=seed)
    sequences = [pool.sequence(LIMIT) for _ in range(5)]
    logits = []
    for number, chunks in enumerate(plan):
        backend.set_threads(1 + number % 3 if isinstance(backend, NativeBackend) else 1)
        steps = [sequences[index].step(tokens) for index, tokens in chunks]
        logits.append(backend.forward(steps, None))
    return torch.cat(logits), pool.memory.data


@pytest.mark.parametrize("instructions", native.instruction_sets(native.FP32))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=switched_shapes(),
    block_size=st.sampled_from([1, 3, 8, 16, 17, 32, 40]),
    seed=st.integers(0, 1 << 20),
)
def test_steps_of_any_shape_over_any_blocks_equal_torch(
    instructions: str, shape: ModelShape, block_size: int, seed: int
) -> None:
    weights = weights_of(shape, torch.float32, seed)
    layout, plan = layout_of(shape, block_size, torch.float32), random_plan(shape, seed)
    actual, written = run(NativeBackend(shape, weights, torch.float32, instructions), plan, layout, seed)
    expected, meant = run(TorchBackend(shape, weights), plan, layout, seed)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(written.isnan(), meant.isnan())
    torch.testing.assert_close(written, meant, rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("instructions", native.instruction_sets(native.BF16))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=switched_shapes(),
    block_size=st.sampled_from([1, 3, 8, 16, 17, 32, 40]),
    seed=st.integers(0, 1 << 20),
)
def test_bf16_steps_write_only_their_own_lanes(
    instructions: str, shape: ModelShape, block_size: int, seed: int
) -> None:
    weights = weights_of(shape, torch.bfloat16, seed)
    layout, plan = layout_of(shape, block_size, torch.bfloat16), random_plan(shape, seed)
    actual, written = run(NativeBackend(shape, weights, torch.bfloat16, instructions), plan, layout, seed)
    _, meant = run(TorchBackend(shape, weights), plan, layout, seed)
    assert actual.isfinite().all()
    assert torch.equal(written.isnan(), meant.isnan())


@pytest.mark.parametrize("instructions", native.instruction_sets(native.BLOCKS))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=shapes(),
    format=st.sampled_from(list(BLOCK_BYTES)),
    block_size=st.sampled_from([1, 3, 8, 16, 17, 32, 40]),
    seed=st.integers(0, 1 << 20),
)
def test_block_matrices_equal_torch_and_write_only_their_lanes(
    instructions: str, shape: ModelShape, format: BlockFormat, block_size: int, seed: int
) -> None:
    weights = block_weights_of(shape, format, seed)
    layout, plan = layout_of(shape, block_size, torch.bfloat16), random_plan(shape, seed)
    actual, written = run(NativeBackend(shape, weights, torch.bfloat16, instructions), plan, layout, seed)
    expected, meant = run(TorchBackend(shape, weights), plan, layout, seed)
    assert actual.isfinite().all()
    assert torch.equal(written.isnan(), meant.isnan())
    # One activation rounded the other way is one of 127 of its group: much in layers of a few numbers.
    assert (actual - expected).square().mean().sqrt() <= 0.1 * expected.square().mean().sqrt() + 1e-4


@pytest.mark.parametrize("instructions", native.instruction_sets(native.BYTES))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=shapes(widest=1300),
    codes=st.sampled_from([None, "q4_0", "q4_1"]),
    block_size=st.sampled_from([1, 3, 8, 16, 17, 32, 40]),
    seed=st.integers(0, 1 << 20),
)
def test_byte_matrices_equal_torch_and_write_only_their_lanes(
    instructions: str, shape: ModelShape, codes: BlockFormat | None, block_size: int, seed: int
) -> None:
    weights = byte_weights_of(shape, seed) if codes is None else coded_weights_of(shape, codes, seed)
    layout, plan = layout_of(shape, block_size, torch.bfloat16), random_plan(shape, seed)
    actual, written = run(NativeBackend(shape, weights, torch.bfloat16, instructions), plan, layout, seed)
    expected, meant = run(TorchBackend(shape, weights), plan, layout, seed)
    assert actual.isfinite().all()
    assert torch.equal(written.isnan(), meant.isnan())
    # As with blocks: one activation rounded the other way is much in layers of a few numbers.
    assert (actual - expected).square().mean().sqrt() <= 0.1 * expected.square().mean().sqrt() + 1e-4
