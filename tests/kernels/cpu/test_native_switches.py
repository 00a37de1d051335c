"""Every switch of a model's shape in the native step: right against torch, and felt where it is off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend, NativeUnavailable
from diptych.engine.backends.native.supports import supports
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.models.shape import LayerShape, ModelShape, QueryGrowth, RopeScaling, Rotation
from diptych.engine.sampling import SampleRow, SamplingParams, sample
from diptych.engine.weights import Weights
from kernels.cpu import library as native
from tests.forms import sampled
from tests.kernels.cpu.same_bits import assert_same_bits
from tests.kernels.cpu.test_native_step import as_fp32, mixed_batches
from tests.kernels.cpu.tiny_models import EVERY_SET, KINDS, Pool, layout_of, shape_of, weights_of

LONG = RopeScaling(
    "longrope",
    original_context=32,
    factors=tuple(1.0 + i / 10 for i in range(20)),
    long_factors=tuple(1.0 + i / 3 for i in range(20)),
    attention_factor=1.19,
)
LOCAL, GLOBAL = Rotation(10_000.0, 40), Rotation(1_000_000.0, 40)
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a-layer-without-rotation": (
        {"layers": (LayerShape(9), LayerShape(rotation=None))},
        {"layers": (LayerShape(9), LayerShape())},
    ),
    "two-rotations": (
        {"rotations": (LOCAL, GLOBAL), "layers": (LayerShape(7, 0), LayerShape(None, 1))},
        {"layers": (LayerShape(7, 0), LayerShape(None, 0))},
    ),
    "part-of-the-width-rotated": ({"rotary_width": 16}, {"rotations": (LOCAL,)}),
    "longrope": ({"rope_scaling": LONG}, {"rotations": (LOCAL,)}),
    "attention-scale": ({"attention_scale": 0.3}, {"attention_scale": None}),
    "score-cap": ({"score_cap": 1.5}, {"score_cap": None}),
    "logit-cap": ({"logit_cap": 3.0}, {"logit_cap": None}),
    "logit-scale": ({"logit_scale": 0.25}, {"logit_scale": 1.0}),
    "sinks": ({"sinks": True}, {"sinks": False}),
    "growing-queries": ({"query_growth": QueryGrowth(0.7, 8)}, {"query_growth": None}),
    "norms-after": ({"norms": "after"}, {"norms": "around"}),
    "norms-around": ({"norms": "around"}, {"norms": "before"}),
    "embedding-scale": ({"embedding_scale": 7.5}, {"embedding_scale": 1.0}),
    "residual-scale": ({"residual_scale": 0.22}, {"residual_scale": 1.0}),
    "gelu": ({"activation": "gelu"}, {"activation": "silu"}),
    "gelu-tanh": ({"activation": "gelu_tanh"}, {"activation": "silu"}),
    "relu-squared": ({"activation": "relu2"}, {"activation": "gelu"}),
    "no-gate": ({"gated": False, "activation": "relu2", "mlp_bias": True}, {"activation": "gelu_tanh"}),
    "width-norms": ({"qk_norm": "width"}, {"qk_norm": "none"}),
    "norms-after-rotation": (
        {"qk_norm": "head", "qk_norm_after_rotation": True},
        {"qk_norm_after_rotation": False},
    ),
    "everything": (
        {
            "rotations": (Rotation(10_000.0, 40, LONG), Rotation(500.0, 24)),
            "layers": (LayerShape(11, 1), LayerShape(None, None), LayerShape(None, 0)),
            "attention_scale": 0.2,
            "score_cap": 4.0,
            "logit_cap": 6.0,
            "sinks": True,
            "query_growth": QueryGrowth(0.3, 16),
            "norms": "around",
            "embedding_scale": 3.0,
            "residual_scale": 0.8,
            "logit_scale": 1.5,
            "activation": "gelu_tanh",
            "qk_norm": "width",
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
        },
        {"score_cap": None},
    ),
}
"""Fields of a shape with the switch on, and what turns it off: the control."""


def switched(name: str) -> ModelShape:
    return shape_of(**SWITCHES[name][0])


def relative_error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    actual, expected = torch.cat(got), torch.cat(want)
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def fitted(weights: Weights, shape: ModelShape) -> Weights:
    """Return the weights without what `shape` has not, and with ones where it has a norm more."""
    if weights.layers[0].input_norm is None:
        ones = torch.ones(shape.hidden_size)
        layers = tuple(replace(layer, input_norm=ones, post_norm=ones) for layer in weights.layers)
        return replace(weights, layers=layers)
    gone: dict[str, None] = {}
    if not shape.sinks:
        gone["sinks"] = None
    if shape.qk_norm == "none":
        gone |= {"q_norm": None, "k_norm": None}
    if shape.norms == "before":
        gone |= {"attention_out_norm": None, "feed_forward_out_norm": None}
    return replace(weights, layers=tuple(replace(layer, **gone) for layer in weights.layers))


@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("name", SWITCHES)
def test_switches_in_fp32_equal_the_torch_backend(name: str, block_size: int) -> None:
    shape = switched(name)
    weights = weights_of(shape, torch.float32)
    backend = NativeBackend(shape, weights, torch.float32)
    backend.set_threads(2)
    expected = mixed_batches(shape, TorchBackend(shape, weights), block_size, torch.float32)
    actual = mixed_batches(shape, backend, block_size, torch.float32)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_off_is_felt(name: str) -> None:
    shape = switched(name)
    other = replace(shape, **SWITCHES[name][1])
    weights = weights_of(shape, torch.float32)
    control = NativeBackend(other, fitted(weights, other), torch.float32)
    expected = mixed_batches(shape, TorchBackend(shape, weights), 16, torch.float32)
    actual = mixed_batches(other, control, 16, torch.float32)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.cat(actual), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("instructions", native.instruction_sets(native.FP32))
@pytest.mark.parametrize(
    "name", ["everything", "no-gate", "norms-after", "relu-squared", "gelu", "norms-after-rotation"]
)
def test_switches_on_every_instruction_set_equal_the_torch_backend(name: str, instructions: str) -> None:
    shape = switched(name)
    weights = weights_of(shape, torch.float32)
    expected = mixed_batches(shape, TorchBackend(shape, weights), 12, torch.float32)
    actual = mixed_batches(
        shape, NativeBackend(shape, weights, torch.float32, instructions), 12, torch.float32
    )
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("instructions", native.instruction_sets(native.BF16))
@pytest.mark.parametrize("block_size", sampled([16, 12], [12]))
@pytest.mark.parametrize("name", ["everything", "no-gate", "norms-after", "sinks", "score-cap"])
def test_switches_in_bf16_come_near_to_fp32(name: str, block_size: int, instructions: str) -> None:
    shape = switched(name)
    weights = weights_of(shape, torch.bfloat16)
    expected = mixed_batches(shape, TorchBackend(shape, as_fp32(weights)), block_size, torch.float32)
    backend = NativeBackend(shape, weights, torch.bfloat16, instructions)
    assert relative_error(mixed_batches(shape, backend, block_size, torch.bfloat16), expected) < 0.02


@pytest.mark.parametrize(
    ("kind", "instructions"), [each for each in EVERY_SET if each[0] in ("blocks", "bytes")]
)
@pytest.mark.parametrize("name", ["everything", "no-gate", "norms-after"])
def test_switches_over_quantised_matrices_equal_the_torch_backend(
    name: str, kind: str, instructions: str
) -> None:
    shape = switched(name)
    _, dtype, weights_in = KINDS[kind]
    weights = weights_in(shape)
    backend = NativeBackend(shape, weights, dtype, instructions)
    backend.set_threads(2)
    expected = mixed_batches(shape, TorchBackend(shape, weights), 16, dtype)
    assert relative_error(mixed_batches(shape, backend, 16, dtype), expected) < 0.03


@pytest.mark.parametrize(("kind", "instructions"), EVERY_SET, ids=str)
@pytest.mark.parametrize("name", sampled(["everything", "norms-after"], ["everything"]))
def test_neighbours_chunks_and_threads_change_no_bit(name: str, kind: str, instructions: str) -> None:
    shape = switched(name)
    _, dtype, weights_in = KINDS[kind]
    assert_same_bits(NativeBackend(shape, weights_in(shape), dtype, instructions), shape, dtype)


def test_greedy_rows_are_taken_of_capped_logits() -> None:
    """Far beyond a cap all logits are equal, and the first of them is taken."""
    shape = shape_of(logit_cap=0.05)
    backend = NativeBackend(shape, weights_of(shape, torch.float32), torch.float32)
    pool = Pool(layout_of(shape, 16, torch.float32), 8)
    steps = [pool.sequence(16).step([token]) for token in range(8)]
    logits = backend.forward(steps, None)
    greedy = SampleRow(SamplingParams(temperature=0.0), (), ())
    assert ((logits == logits.max(dim=-1, keepdim=True).values).sum(dim=-1) > 1).any()
    assert backend.forward_and_sample(steps, [greedy] * 8, None).tokens == sample(logits, [greedy] * 8)


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"norm": "layer"}, "LayerNorm"),
        ({"parallel_residual": True}, "parallel attention and feed-forward"),
    ],
)
def test_shapes_that_are_not_computed_are_refused_in_words(changes: dict[str, Any], lacking: str) -> None:
    shape = shape_of(**changes)
    assert supports(shape) == lacking
    with pytest.raises(NativeUnavailable, match=f"does not compute {lacking}"):
        NativeBackend(shape, weights_of(shape, torch.float32), torch.float32)


def test_every_other_switch_is_supported() -> None:
    assert [supports(switched(name)) for name in SWITCHES] == [None] * len(SWITCHES)
