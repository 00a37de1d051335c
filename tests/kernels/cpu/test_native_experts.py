"""Experts in the native step: right against torch for every routing, and the same bits beside any rows."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape
from diptych.engine.weights import Weights
from kernels.cpu import library as native
from tests.kernels.cpu.same_bits import assert_same_bits
from tests.kernels.cpu.test_guests import OTHERS, Cores
from tests.kernels.cpu.test_native_step import as_fp32, mixed_batches
from tests.kernels.cpu.test_native_switches import relative_error
from tests.kernels.cpu.tiny_models import EVERY_SET, KINDS, Pool, layout_of, shape_of, tokens_of, weights_of

PLAIN = ExpertsShape(num_experts=7, experts_per_token=2, intermediate_size=50)
ROUTINGS: dict[str, tuple[ExpertsShape, dict[str, Any]]] = {
    "softmax": (PLAIN, {"routing": "sigmoid"}),
    "normalised": (replace(PLAIN, normalise=True), {"normalise": False}),
    "picked-then-softmax": (replace(PLAIN, routing="topk_then_softmax"), {"routing": "softmax_then_topk"}),
    "sigmoid": (replace(PLAIN, routing="sigmoid", normalise=True, scale=1.7), {"scale": 1.0}),
    "corrected": (
        replace(PLAIN, routing="sigmoid", normalise=True, correction_bias=True),
        {"correction_bias": False},
    ),
    "groups": (
        replace(PLAIN, num_experts=12, groups=4, groups_per_token=2, experts_per_token=3),
        {"groups": 1, "groups_per_token": 1},
    ),
    "groups-by-two": (
        replace(
            PLAIN,
            num_experts=12,
            experts_per_token=4,
            routing="sigmoid",
            correction_bias=True,
            groups=3,
            groups_per_token=2,
            group_score="best_two",
        ),
        {"group_score": "best"},
    ),
    "shared": (replace(PLAIN, shared_size=70), {"shared_size": 0}),
    "gated-shared": (replace(PLAIN, shared_size=170, shared_gate=True), {"shared_gate": False}),
    "biases": (replace(PLAIN, bias=True, router_bias=True), {"router_bias": False}),
    "clamped": (replace(PLAIN, routing="topk_then_softmax", clamp=0.6, bias=True), {"clamp": 6.0}),
    "one-of-all": (replace(PLAIN, experts_per_token=1), {"experts_per_token": 2}),
    "all-of-them": (replace(PLAIN, experts_per_token=7), {"routing": "sigmoid"}),
    "many": (replace(PLAIN, num_experts=40, experts_per_token=6, normalise=True), {"experts_per_token": 5}),
}
"""Experts of a layer, and what changes their numbers: the control."""


def shape_with(experts: ExpertsShape, **changes: Any) -> ModelShape:
    """Return a shape whose second layer has a dense feed-forward, the others experts."""
    layers = (LayerShape(experts=True), LayerShape(9), LayerShape(experts=True))
    activation = "silu" if experts.clamp is None else "clamped_swiglu"
    if activation != "silu":
        layers = (LayerShape(experts=True), LayerShape(9, experts=True))
    return shape_of(**{"layers": layers, "experts": experts, "activation": activation, **changes})


def fitted(weights: Weights, shape: ModelShape) -> Weights:
    """Return the weights without what the experts of `shape` have not."""
    assert shape.experts is not None
    gone: dict[str, None] = {}
    if not shape.experts.shared_size:
        gone |= {"shared_gate": None, "shared_up": None, "shared_down": None}
    if not shape.experts.shared_gate:
        gone["shared_router"] = None
    if not shape.experts.correction_bias:
        gone["correction_bias"] = None
    if not shape.experts.router_bias:
        gone["router_bias"] = None
    layers = [
        layer if layer.experts is None else replace(layer, experts=replace(layer.experts, **gone))
        for layer in weights.layers
    ]
    return replace(weights, layers=tuple(layers))


THREADED = ("many", "gated-shared", "one-of-all")


@pytest.mark.parametrize(
    ("name", "threads"),
    [
        *((name, 1) for name in ROUTINGS),
        *(pytest.param(name, 3, marks=() if name in THREADED else pytest.mark.full) for name in ROUTINGS),
    ],
)
def test_experts_in_fp32_equal_the_torch_backend(name: str, threads: int) -> None:
    shape = shape_with(ROUTINGS[name][0])
    weights = weights_of(shape, torch.float32)
    backend = NativeBackend(shape, weights, torch.float32)
    backend.set_threads(threads)
    expected = mixed_batches(shape, TorchBackend(shape, weights), 16, torch.float32)
    actual = mixed_batches(shape, backend, 16, torch.float32)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ROUTINGS)
def test_another_routing_is_felt(name: str) -> None:
    shape = shape_with(ROUTINGS[name][0])
    other = shape_with(replace(ROUTINGS[name][0], **ROUTINGS[name][1]))
    weights = weights_of(shape, torch.float32)
    expected = mixed_batches(shape, TorchBackend(shape, weights), 16, torch.float32)
    actual = mixed_batches(
        other, NativeBackend(other, fitted(weights, other), torch.float32), 16, torch.float32
    )
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.cat(actual), torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_swapped_experts_are_felt() -> None:
    shape = shape_with(PLAIN)
    weights = weights_of(shape, torch.float32)
    first = weights.layers[0].experts
    assert first is not None
    swapped = replace(first, downs=(first.downs[1], first.downs[0], *first.downs[2:]))
    control = replace(weights, layers=(replace(weights.layers[0], experts=swapped), *weights.layers[1:]))
    expected = mixed_batches(shape, TorchBackend(shape, weights), 16, torch.float32)
    actual = mixed_batches(shape, NativeBackend(shape, control, torch.float32), 16, torch.float32)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.cat(actual), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"norms": "around"}, {"norms": "after"}, {"residual_scale": 0.3}], ids=str
)
def test_experts_beside_other_switches_equal_the_torch_backend(changes: dict[str, Any]) -> None:
    shape = shape_with(ROUTINGS["gated-shared"][0], **changes)
    weights = weights_of(shape, torch.float32)
    expected = mixed_batches(shape, TorchBackend(shape, weights), 16, torch.float32)
    actual = mixed_batches(shape, NativeBackend(shape, weights, torch.float32), 16, torch.float32)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("instructions", native.instruction_sets(native.FP32))
@pytest.mark.parametrize("name", ["clamped", "gated-shared", "many"])
def test_experts_on_every_instruction_set_equal_the_torch_backend(name: str, instructions: str) -> None:
    shape = shape_with(ROUTINGS[name][0])
    weights = weights_of(shape, torch.float32)
    backend = NativeBackend(shape, weights, torch.float32, instructions)
    expected = mixed_batches(shape, TorchBackend(shape, weights), 12, torch.float32)
    for want, got in zip(expected, mixed_batches(shape, backend, 12, torch.float32), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_of_equal_logits_the_first_experts_are_picked() -> None:
    shape = shape_with(PLAIN)
    weights = weights_of(shape, torch.float32)
    layers = [
        layer
        if layer.experts is None
        else replace(layer, experts=replace(layer.experts, router=torch.zeros_like(layer.experts.router)))
        for layer in weights.layers
    ]
    even = replace(weights, layers=tuple(layers))
    expected = mixed_batches(shape, TorchBackend(shape, even), 16, torch.float32)
    actual = mixed_batches(shape, NativeBackend(shape, even, torch.float32), 16, torch.float32)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


OF_KINDS = {kind: native.instruction_sets(flags[0]) for kind, flags in KINDS.items()}
ENDS = {(kind, sets[place]) for kind, sets in OF_KINDS.items() for place in (0, -1)}
SETS = [pytest.param(*one, marks=() if one in ENDS else pytest.mark.full) for one in EVERY_SET]
"""Of each kind the widest instructions and the plain code in every run; dense layers are tried on all."""
MIXED = shape_with(replace(PLAIN, num_experts=12, shared_size=70, shared_gate=True, normalise=True))


@pytest.mark.parametrize(("kind", "instructions"), SETS, ids=str)
def test_experts_in_every_precision_come_near_to_torch(kind: str, instructions: str) -> None:
    _, dtype, weights_in = KINDS[kind]
    # All experts for every row: which of them are picked does not hang on a rounding.
    shape = shape_with(replace(PLAIN, experts_per_token=7, shared_size=70, shared_gate=True))
    weights = weights_in(shape)
    meant, kept = (as_fp32(weights), torch.float32) if kind == "bf16" else (weights, dtype)
    backend = NativeBackend(shape, weights, dtype, instructions)
    backend.set_threads(2)
    expected = mixed_batches(shape, TorchBackend(shape, meant), 16, kept)
    assert relative_error(mixed_batches(shape, backend, 16, dtype), expected) < 0.03


@pytest.mark.parametrize(("kind", "instructions"), SETS, ids=str)
def test_neighbours_chunks_and_threads_change_no_bit_of_experts(kind: str, instructions: str) -> None:
    _, dtype, weights_in = KINDS[kind]
    assert_same_bits(NativeBackend(MIXED, weights_in(MIXED), dtype, instructions), MIXED, dtype)


@pytest.mark.parametrize("threads", [1, 2])
def test_guests_that_come_and_go_change_no_bit_of_experts(threads: int) -> None:
    cores = Cores()
    backend = NativeBackend(MIXED, weights_of(MIXED, torch.float32), torch.float32)
    backend.use_idle_cores(ctypes.addressof(cores.states), OTHERS)
    pool = Pool(layout_of(MIXED, 16, torch.float32), 64)
    batch = [pool.sequence(length).step(tokens_of(length)) for length in (90, 1, 7)]
    cores.all(native.CORE_OWNED)
    expected = backend.forward(batch, None)
    backend.set_threads(threads)
    with cores.taken_and_left(threads):
        for _ in range(30):
            assert torch.equal(backend.forward(batch, None), expected)


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    shape = shape_with(PLAIN)
    weights = weights_of(shape, torch.float32)
    weights.embed[9] = float("nan")
    backend = NativeBackend(shape, weights, torch.float32)
    pool = Pool(layout_of(shape, 16, torch.float32), 4)
    steps = [pool.sequence(16).step([token]) for token in (3, 9, 4)]
    logits = backend.forward(steps, None)
    assert logits[1].isnan().all()
    assert torch.equal(logits[[0, 2]], backend.forward([steps[0], steps[2]], None))
