"""Recurrent layers against transformers' own: whole texts, texts in pieces, and many sequences in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import CONFIG_MAPPING
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from diptych.engine.backends.torch.recurrent.layer import RecurrentLayer, make_layer
from diptych.engine.backends.torch.recurrent.pieces import PIECE_ROWS
from diptych.engine.models.recurrent import RecurrentShape
from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape

HIDDEN, TEXT, EPS = 40, 150, 1e-6
ROUNDING = 1e-5
"""Largest difference in float32, as a share of the largest number."""
CUTS = {
    "whole": (),
    "pieces": (64, 128),
    "odd": (1, 2, 5, 77, 100),
    "tokens": tuple(range(1, TEXT)),
}
_MAMBA2 = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 32,
    "rms_norm_eps": EPS,
}
_MAMBA2_NAMES = {
    "in_proj": "in_proj.weight",
    "in_proj_bias": "in_proj.bias",
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "decay": "A_log",
    "step_bias": "dt_bias",
    "skip": "D",
    "norm": "norm.weight",
    "out_proj": "out_proj.weight",
    "out_proj_bias": "out_proj.bias",
}
Pair = tuple[torch.nn.Module, RecurrentShape, dict[str, str]]


def delta() -> Pair:
    config = CONFIG_MAPPING["qwen3_5_text"](
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        layer_types=["linear_attention"],
    )
    names = {
        "qkv_proj": "in_proj_qkv.weight",
        "gate_proj": "in_proj_z.weight",
        "rate": "in_proj_b.weight",
        "step": "in_proj_a.weight",
        "conv": "conv1d.weight",
        "decay": "A_log",
        "step_bias": "dt_bias",
        "norm": "norm.weight",
        "out_proj": "out_proj.weight",
    }
    return Qwen3_5GatedDeltaNet(config, 0), DeltaShape(2, 6, 8, 12, 4), names


def granite() -> Pair:
    config = CONFIG_MAPPING["granitemoehybrid"](
        **_MAMBA2, mamba_expand=3, mamba_d_head=20, mamba_proj_bias=True, layer_types=["linear_attention"]
    )
    shape = SpaceShape(6, 20, 2, 12, 4, in_bias=True, out_bias=True)
    return GraniteMoeHybridMambaLayer(config, 0), shape, _MAMBA2_NAMES


def falcon(**switches: Any) -> Pair:
    config = CONFIG_MAPPING["falcon_h1"](**_MAMBA2, mamba_d_ssm=48, mamba_d_head=8, **switches)
    layer = FalconH1Mixer(config, 0)
    layer.register_buffer("mup_vector", compute_mup_vector(config), persistent=False)
    norm = "before_gate" if switches else "none"
    return layer, SpaceShape(6, 8, 2, 12, 4, norm=norm), _MAMBA2_NAMES


def jamba() -> Pair:
    config = CONFIG_MAPPING["jamba"](
        hidden_size=HIDDEN, num_hidden_layers=1, mamba_d_state=6, mamba_dt_rank=5, use_mamba_kernels=False
    )
    names = {
        **{name: place for name, place in _MAMBA2_NAMES.items() if name not in ("norm", "step_bias")},
        "x_proj": "x_proj.weight",
        "step_proj": "dt_proj.weight",
        "step_bias": "dt_proj.bias",
        "step_norm": "dt_layernorm.weight",
        "b_norm": "b_layernorm.weight",
        "c_norm": "c_layernorm.weight",
    }
    return JambaMambaMixer(config, 0), ScanShape(80, 6, 4, 5), names


KINDS: dict[str, Callable[[], Pair]] = {
    "delta": delta,
    "mamba2-after-gate": granite,
    "mamba2-before-gate": lambda: falcon(mamba_rms_norm=True, mamba_norm_before_gate=True),
    "mamba2-gate-only": falcon,
    "mamba": jamba,
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, RecurrentShape, dict[str, torch.Tensor]]:
    """Transformers' layer with random weights, the shape, and the same weights by our names."""
    torch.manual_seed(4)
    peer, shape, names = KINDS[request.param]()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            # Slow decays, so that the first tokens are still felt by the last.
            low = -5.0 if name == "A_log" else -1.0 if name.endswith(("dt_bias", "dt_proj.bias")) else 0.0
            parameter.copy_(torch.randn(parameter.shape) * (0.2 if low else 0.4) + low)
    held = dict(peer.named_parameters())
    tensors = {name: held[names[name]].detach() for name, _ in shape.tensors(HIDDEN)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == dict(shape.tensors(HIDDEN))
    return peer, shape, tensors


@pytest.fixture
def layer(pair: Any) -> RecurrentLayer:
    """Our layer of the pair's weights."""
    _, shape, tensors = pair
    return make_layer(shape, tensors, functional.linear, EPS)


def text(seed: int = 0) -> torch.Tensor:
    return torch.randn(TEXT, HIDDEN, generator=torch.Generator().manual_seed(seed))


def zeros(shape: RecurrentShape, sequences: int = 1) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(sequences, *size) for size in shape.states)


def run(
    layer: RecurrentLayer, shape: RecurrentShape, x: torch.Tensor, cuts: tuple[int, ...], *, keep: bool = True
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the layer's outputs of a text cut in pieces, and the states behind it; forgets unless `keep`."""
    states, outs = zeros(shape), []
    for begin, end in zip((0, *cuts), (*cuts, len(x)), strict=True):
        mixed, after = layer.advance(layer.project(x[begin:end])[None], states)
        outs.append(layer.output(mixed[0]))
        states = after if keep else zeros(shape)
    return torch.cat(outs), states


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@torch.no_grad()
def test_layer_equals_transformers_however_the_text_is_cut(
    pair: Any, layer: RecurrentLayer, cuts: tuple[int, ...]
) -> None:
    peer, shape, _ = pair
    expected = peer(text()[None])[0]
    assert expected.std() > 0.1
    got, _ = run(layer, shape, text(), cuts)
    assert (got - expected).abs().max() < ROUNDING * expected.abs().max()


@torch.no_grad()
def test_forgotten_states_show(pair: Any, layer: RecurrentLayer) -> None:
    peer, shape, _ = pair
    got, _ = run(layer, shape, text(), (100,), keep=False)
    difference = (got - peer(text()[None])[0]).abs()
    scale = got.abs().max()
    assert difference[:100].max() < ROUNDING * scale
    assert difference[100:].max() > 1e-2 * scale
    assert difference[120:].max() > 100 * ROUNDING * scale


@torch.no_grad()
def test_calls_that_begin_at_whole_pieces_give_the_same_bits(pair: Any, layer: RecurrentLayer) -> None:
    shape = pair[1]
    x = text()
    whole, behind = layer.advance(layer.project(x)[None], zeros(shape))
    states, outs = zeros(shape), []
    for begin in range(0, TEXT, PIECE_ROWS):
        mixed, states = layer.advance(layer.project(x)[None, begin : begin + PIECE_ROWS], states)
        outs.append(mixed)
    assert torch.equal(torch.cat(outs, dim=1), whole)
    assert all(torch.equal(one, other) for one, other in zip(states, behind, strict=True))


@pytest.mark.parametrize("tokens", [1, 3])
@torch.no_grad()
def test_sequences_in_one_call_equal_each_alone(pair: Any, layer: RecurrentLayer, tokens: int) -> None:
    shape = pair[1]
    begun = [run(layer, shape, text(seed), ())[1] for seed in range(5)]
    states = tuple(torch.cat(parts) for parts in zip(*begun, strict=True))
    before = [state.clone() for state in states]
    rows = torch.stack([text(10 + seed)[:tokens] for seed in range(5)])
    projected = layer.project(rows.flatten(0, 1)).unflatten(0, (5, tokens))
    mixed, after = layer.advance(projected, states)
    assert all(torch.equal(one, other) for one, other in zip(states, before, strict=True))
    for number in range(5):
        alone, behind = layer.advance(projected[number : number + 1], begun[number])
        assert (mixed[number] - alone[0]).abs().max() < ROUNDING * alone.abs().max()
        for one, other in zip(behind, after, strict=True):
            assert (one[0] - other[number]).abs().max() < ROUNDING * one.abs().max()
    swapped, _ = layer.advance(projected, tuple(state.roll(1, 0) for state in states))
    assert (swapped - mixed).abs().max() > 1e-2


@torch.no_grad()
def test_bfloat16_rows_keep_float32_states(pair: Any, layer: RecurrentLayer) -> None:
    _, shape, tensors = pair
    kept = ("decay", "step_bias", "skip")
    halves = {name: one if name in kept else one.bfloat16() for name, one in tensors.items()}
    exact, _ = layer.advance(layer.project(text())[None], zeros(shape))
    half = make_layer(shape, halves, functional.linear, EPS)
    rounded, states = half.advance(half.project(text().bfloat16())[None], zeros(shape))
    assert rounded.dtype == torch.bfloat16
    assert all(state.dtype == torch.float32 for state in states)
    assert (rounded - exact).norm() < 0.05 * exact.norm()
