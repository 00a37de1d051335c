"""Families with recurrent layers against transformers: logits, greedy tokens, refusals, and controls."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.engine.backends.native.supports import supports as native_supports
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.torch.recurrent.layer import make_layer
from diptych.engine.backends.triton.supports import supports as triton_supports
from diptych.engine.loaded_model import load_model
from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.engine.models.family import Family, Stored
from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape
from diptych.engine.models.registry import family_of
from diptych.engine.models.shape import LayerShape, ModelShape, UnsupportedModel
from diptych.engine.weights import Checkpoint, safetensors_folder
from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.engine.weights.hf_config import read_config
from tests.diptych.engine.models.family_models import (
    BLOCK,
    TEXT,
    Stepper,
    check_bfloat16,
    check_greedy,
    oracle_logits,
    text_of,
)
from tests.diptych.engine.models.recurrent_models import CASES, config_of, oracle_of, save

EXACT = 1e-4
"""Largest difference of a logit in float32."""
SHOWS = 1e-2
"""Least difference of some logit where something is left out."""
OPEN = (0.0, math.inf)
"""Bounds of steps that bound none."""
SAMPLE = frozenset({"qwen3-next", "granite4-h", "falcon-h1", "jamba"})
"""Cases of every kind of layer."""
GREEDY = [pytest.param(16, 4, id="short"), pytest.param(64, 16, id="long", marks=pytest.mark.full)]
"""Tokens of each text, and texts in a step."""

pytestmark = pytest.mark.usefixtures("one_thread")


def _saved(name: str, folder: Path) -> tuple[Any, Path]:
    oracle = oracle_of(name)
    return oracle, save(oracle, folder)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of a case, transformers' own and its folder."""
    return _saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(
    scope="module",
    params=[name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in CASES],
)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model as `case` is; in the short form one of each kind of layer."""
    return _saved(request.param, tmp_path_factory.mktemp(request.param))


def logits_of(checkpoint: Checkpoint, chunk: int = TEXT) -> torch.Tensor:
    """Return the torch backend's logits of a text, `[tokens, vocab]`."""
    backend = TorchBackend(checkpoint.shape, checkpoint.weights)
    return Stepper(backend, checkpoint.shape).logits(text_of(TEXT), chunk)


def test_logits_equal_transformers_however_the_text_is_cut(case: tuple[Any, Path]) -> None:
    oracle, folder = case
    expected = oracle_logits(oracle, text_of(TEXT))
    assert expected.std() > 0.1
    checkpoint = read_checkpoint(folder, "fp32")
    for chunk in (TEXT, 16, 23):
        torch.testing.assert_close(logits_of(checkpoint, chunk), expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize(("tokens", "texts"), GREEDY)
def test_greedy_tokens_equal_transformers_alone_and_mixed(
    sample: tuple[Any, Path], tokens: int, texts: int
) -> None:
    oracle, folder = sample
    model = load_model(folder, torch.float32, backend="torch")
    check_greedy(oracle, model.backend, model.shape, tokens, texts)


def test_bfloat16_is_as_near_to_float32_as_transformers(sample: tuple[Any, Path]) -> None:
    oracle, folder = sample
    check_bfloat16(oracle, load_model(folder, torch.bfloat16, backend="torch"))


def test_int8_is_near_to_float32(sample: tuple[Any, Path]) -> None:
    oracle, folder = sample
    model = load_model(folder, "int8", backend="torch")
    got = Stepper(model.backend, model.shape, torch.bfloat16).logits(text_of(TEXT), TEXT)
    exact = oracle_logits(oracle, text_of(TEXT))
    assert (got - exact).norm() < 0.25 * exact.norm()


def test_states_that_are_forgotten_show(case: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first block's tokens read zeros for states, and keys and values as they are."""
    checkpoint = read_checkpoint(case[1], "fp32")
    exact = logits_of(checkpoint, 48)

    def forgetful(*given: Any) -> Any:
        layer = make_layer(*given)
        advance = layer.advance
        monkeypatch.setattr(
            layer, "advance", lambda mixed, states: advance(mixed, tuple(map(torch.zeros_like, states)))
        )
        return layer

    monkeypatch.setattr("diptych.engine.backends.torch.decoder.make_layer", forgetful)
    difference = (logits_of(checkpoint, 48) - exact).abs()
    assert difference[:BLOCK].max() < EXACT
    assert difference[48:].max() > SHOWS


def test_each_switch_left_out_shows(case: tuple[Any, Path]) -> None:
    checkpoint = read_checkpoint(case[1], "fp32")
    exact = logits_of(checkpoint)
    for name, other in _without_each(checkpoint):
        assert (logits_of(other) - exact).abs().max() > SHOWS, name


def _without_each(checkpoint: Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the model without each of its switches, by the switch's name."""
    shape = checkpoint.shape
    if shape.attention_gate:
        yield "attention_gate", _with_layers(checkpoint, q_gate=None)
    for layer in shape.layers:
        space = layer.recurrent
        if isinstance(space, SpaceShape) and space.norm != "none":
            other = "after_gate" if space.norm == "before_gate" else "before_gate"
            yield "norm", _with_changes(checkpoint, SpaceShape, norm=other)
            break
    if any(
        isinstance(one.recurrent, SpaceShape) and one.recurrent.step_bounds != OPEN for one in shape.layers
    ):
        yield "bounds", _with_changes(checkpoint, SpaceShape, step_bounds=OPEN)
    if any(
        isinstance(one.recurrent, DeltaShape) and one.recurrent.largest_rate != 1.0 for one in shape.layers
    ):
        yield "largest_rate", _with_changes(checkpoint, DeltaShape, largest_rate=1.0)
    if any(layer.attention and layer.recurrent is not None for layer in shape.layers):
        unwritten = {"o": torch.zeros_like(checkpoint.weights.layers[0].o)}
        yield "attention beside the recurrence", _with_layers(checkpoint, **unwritten)
    if any(layer.rotation is None for layer in shape.layers if layer.attention):
        layers = tuple(replace(layer, rotation=0) for layer in shape.layers)
        yield "unrotated", replace(checkpoint, shape=replace(shape, layers=layers))
    elif shape.rotations[0].width < shape.head_dim:
        wide = (replace(shape.rotations[0], width=shape.head_dim),)
        yield "width", replace(checkpoint, shape=replace(shape, rotations=wide))


def _with_layers(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    layers = tuple(replace(layer, **changes) for layer in checkpoint.weights.layers)
    return replace(checkpoint, weights=replace(checkpoint.weights, layers=layers))


def _with_changes(checkpoint: Checkpoint, kind: type, **changes: Any) -> Checkpoint:
    """Return the model with changes of its layers with a recurrence of this kind."""
    layers = tuple(
        replace(layer, recurrent=replace(layer.recurrent, **changes))
        if isinstance(layer.recurrent, kind)
        else layer
        for layer in checkpoint.shape.layers
    )
    return replace(checkpoint, shape=replace(checkpoint.shape, layers=layers))


def test_tensors_read_otherwise_show(case: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms without the one that their file leaves out, rows in a row, matrices without their factors."""
    exact = logits_of(read_checkpoint(case[1], "fp32"))
    for other in _read_otherwise(family_of(str(read_config(case[1])["model_type"]))):
        monkeypatch.setattr(safetensors_folder, "family_of", lambda _, other=other: other)
        assert (logits_of(read_checkpoint(case[1], "fp32")) - exact).abs().max() > SHOWS


def _read_otherwise(family: Family) -> Iterator[Family]:
    """Yield the family with each mistake that its reader could make, of each place that has such."""
    for changes in ({"plus": 0.0}, {"rows": None}, {"make": None, "made_of": None}):
        [first, *_] = changes
        wrong = {
            field: replace(place, **changes)
            for field, place in family.layer.items()
            if isinstance(place, Stored) and getattr(place, first)
        }
        for name in {place.name for place in wrong.values()} if first == "rows" else {""} if wrong else ():
            chosen = {field: place for field, place in wrong.items() if place.name == name or not name}
            yield replace(family, layer={**family.layer, **chosen})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads that are not shared evenly": (
        "qwen3.5",
        {"linear_num_value_heads": 5},
        "linear_num_value_heads 5",
    ),
    "a text for a number": ("qwen3.5", {"linear_key_head_dim": "8"}, "linear_key_head_dim is '8'"),
    "another activation": ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not computed"),
    "no gate of attention": ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate False"),
    "an interval of nothing": (
        "qwen3.5",
        {"layer_types": None, "full_attention_interval": 0},
        "full_attention_interval is 0",
    ),
    "no layer that attends": (
        "qwen3.5",
        {"layer_types": ["linear_attention"] * 4},
        "no layer attends",
    ),
    "an unknown kind": ("qwen3.5", {"layer_types": ["rwkv"] * 4}, "layer_types: rwkv"),
    "heads that do not fit": ("granite4-h", {"mamba_d_head": 31}, "mamba_d_head 31 do not make 192 channels"),
    "groups that do not fit": ("bamba", {"mamba_n_groups": 4}, "6 heads of Mamba-2 in 4 groups"),
    "bounds of no steps": ("bamba", {"time_step_limit": [0.1, 0.01]}, "time_step_limit is"),
    "factors of another number": ("falcon-h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is"),
    "a bias beside a gate": ("qwen3.5", {"attention_bias": True}, "attention_bias True"),
    "biases under factors": ("falcon-h1", {"attention_bias": True}, "attention_bias True"),
    "another letter": (
        "nemotron-h",
        {"layers_block_type": None, "hybrid_override_pattern": "MX*"},
        "hybrid_override_pattern is 'MX",
    ),
    "a number for the layers": ("nemotron-h", {"layers_block_type": 4}, "layers_block_type is 4"),
    "a text for the layers": (
        "granite4-h",
        {"layer_types": None, "layers_block_type": "mamba"},
        "layers_block_type is 'mamba'",
    ),
    "experts in a latent": ("nemotron-h-experts", {"moe_latent_size": 8}, "moe_latent_size 8"),
    "an offset beyond its period": ("jamba", {"attn_layer_offset": 2}, "attn_layer_offset 2 is no layer"),
    "layers of no kind": ("lfm2-experts", {"layer_types": None}, "layer_types is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_make_no_sense_are_refused(name: str, tmp_path: Path) -> None:
    of, changes, message = REFUSED[name]
    save(oracle_of(of), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UnsupportedModel, match=message):
        load_model(tmp_path, torch.float32, backend="torch")


@pytest.mark.parametrize("stacked", [False, True])
def test_the_text_model_within_a_wrapper_is_read(stacked: bool, tmp_path: Path) -> None:
    """Published folders have an encoder, layers that draft, and all experts of a layer in one tensor."""
    oracle = oracle_of("qwen3.5-experts")
    save(oracle, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if stacked:
        tensors = _stacked(tensors, oracle.config.num_experts)
    beside = {"model.visual.blocks.0.norm1.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3, 3)}
    wrapped = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    save_file({**wrapped, **beside}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    inner = json.loads(path.read_text())
    path.write_text(
        json.dumps({"model_type": "qwen3_5_moe", "text_config": inner, "tie_word_embeddings": False})
    )
    expected = oracle_logits(oracle, text_of(TEXT))
    got = logits_of(read_checkpoint(tmp_path, "fp32"))
    torch.testing.assert_close(got, expected, atol=EXACT, rtol=0)


def _stacked(tensors: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Return a folder's tensors with all experts of a layer in one, gates before ups."""
    made = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for prefix in {name.split("experts.")[0] + "experts." for name in tensors if ".mlp.experts." in name}:
        gates, ups, downs = (
            torch.stack([tensors[f"{prefix}{number}.{part}_proj.weight"] for number in range(experts)])
            for part in ("gate", "up", "down")
        )
        made[f"{prefix}gate_up_proj"] = torch.cat([gates, ups], dim=1)
        made[f"{prefix}down_proj"] = downs
    return made


@pytest.mark.parametrize("name", CASES)
def test_each_family_is_computed_natively_and_on_gpus_but_for_experts_without_a_gate(name: str) -> None:
    shape = _shape_of(name)
    assert native_supports(shape) is None
    ungated = shape.experts is not None and not shape.experts.gated
    assert triton_supports(shape) == ("experts without a gate" if ungated else None)


def test_what_the_native_step_lacks_is_named() -> None:
    [shape] = (layer.recurrent for layer in _shape_of("jamba").layers[:1])
    assert isinstance(shape, ScanShape)
    for changes, message in (({"state": 300}, "256 numbers"), ({"taps": 17}, "16 tokens")):
        layers = tuple(LayerShape() for _ in range(2))
        layers = (replace(layers[0], attention=False, recurrent=replace(shape, **changes)), layers[1])
        assert message in str(native_supports(replace(_shape_of("jamba"), layers=layers)))


def _shape_of(name: str) -> ModelShape:
    return shape_from_config(resolve_config(config_of(name).to_dict()), tied=False)


@pytest.mark.parametrize("switch", ["attention_gate", "experts"])
def test_new_switches_are_left_to_torch_by_themselves_on_gpus(switch: str) -> None:
    plain = _shape_of("qwen3-next")
    layers = tuple(LayerShape(experts=layer.experts) for layer in plain.layers)
    shape = replace(plain, layers=layers, attention_gate=False)
    assert native_supports(shape) is None
    assert plain.experts is not None
    changes: dict[str, Any] = {"attention_gate": True}
    if switch == "experts":
        changes = {"experts": replace(plain.experts, gated=False)}
    assert "gate" in str(triton_supports(replace(shape, **changes)))
    assert (native_supports(replace(shape, **changes)) is None) == (switch == "attention_gate")
