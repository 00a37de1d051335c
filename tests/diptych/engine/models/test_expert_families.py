"""Families with experts equal transformers: logits, greedy tokens alone and among others, and controls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.loaded_model import Model, load_model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import LayerWeights, Weights
from diptych.engine.weights.checkpoint import read_checkpoint
from tests.diptych.engine.models.expert_models import (
    CONFIGS,
    all_logits,
    greedy,
    is_greedy,
    oracle_logits,
    oracle_of,
    prompts,
    recorded_gaps,
)

LONG = prompts()[-1] + prompts()[-2]


@pytest.mark.parametrize("name", CONFIGS)
def test_all_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    model, expected = load(tmp_path), oracle_logits(oracle, LONG)
    for chunk in (len(LONG), 7):
        torch.testing.assert_close(all_logits(model, LONG, chunk), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_alone_and_among_sixteen_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    model = load(tmp_path)
    with recorded_gaps() as gaps:
        together = greedy(model, prompts(), 64)
    assert min(gaps) > 1e-3, "a choice of experts that rounding could turn"
    for prompt, tokens in zip(prompts(), together, strict=True):
        assert is_greedy(oracle, prompt, tokens)
    for number in (0, 9):
        assert greedy(model, [prompts()[number]], 64) == [together[number]]


FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "weights normalised": ("olmoe", {"norm_topk_prob": True}),
    "one expert less": ("mixtral", {"num_experts_per_tok": 2}),
    "no window": ("mixtral", {"sliding_window": None}),
    "another scale of scores": ("granitemoe", {"attention_multiplier": 0.2}),
    "another scale of the residual": ("granitemoe", {"residual_multiplier": 1.0}),
    "another scale of logits": ("granitemoe", {"logits_scaling": 1.0}),
    "another clamp": ("gpt_oss", {"swiglu_limit": 7.0}),
    "windows in the other layers": (
        "gpt_oss",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "another part of heads rotated": ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.4}}),
    "another factor of experts": ("glm4_moe", {"routed_scaling_factor": 1.0}),
    "weights of sigmoids not normalised": ("glm4_moe", {"norm_topk_prob": False}),
}


@pytest.mark.parametrize("control", FIELDS)
def test_another_field_changes_the_logits(control: str, tmp_path: Path) -> None:
    name, changes = FIELDS[control]
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field, value in changes.items():
        config[field] = {**config[field], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    difference = all_logits(load(tmp_path), LONG, 20) - oracle_logits(oracle, LONG)
    assert difference.abs().max() > 1e-2


def swapped(layer: LayerWeights) -> LayerWeights:
    """Return the layer with two of its experts in each other's place."""
    if layer.experts is None:
        return layer
    downs = layer.experts.downs
    return replace(layer, experts=replace(layer.experts, downs=(downs[1], downs[0], *downs[2:])))


def without_shared(layer: LayerWeights) -> LayerWeights:
    if layer.experts is None:
        return layer
    return replace(layer, experts=replace(layer.experts, shared_gate=None))


def without_correction(layer: LayerWeights) -> LayerWeights:
    if layer.experts is None:
        return layer
    return replace(layer, experts=replace(layer.experts, correction_bias=None))


def without_sinks(layer: LayerWeights) -> LayerWeights:
    return replace(layer, sinks=None)


WEIGHTS: dict[str, tuple[str, Callable[[LayerWeights], LayerWeights]]] = {
    "swapped experts": ("qwen3_moe", swapped),
    "swapped experts of chosen softmax": ("granitemoe", swapped),
    "no shared expert": ("glm4_moe", without_shared),
    "no shared expert behind its gate": ("qwen2_moe", without_shared),
    "no correction": ("glm4_moe", without_correction),
    "no sinks": ("gpt_oss", without_sinks),
}


@pytest.mark.parametrize("control", WEIGHTS)
def test_changed_weights_change_the_logits(control: str, tmp_path: Path) -> None:
    name, change = WEIGHTS[control]
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    model = load(tmp_path)
    weights: Weights = read_checkpoint(tmp_path, "fp32").weights
    wrong = replace(weights, layers=tuple(map(change, weights.layers)))
    changed = replace(model, backend=TorchBackend(model.shape, wrong))
    difference = all_logits(changed, LONG, 20) - oracle_logits(oracle, LONG)
    assert difference.abs().max() > 1e-2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "clip_qkv": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
    "swiglu_alpha": ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
    "more experts a token than there are": ("mixtral", {"num_experts_per_tok": 11}, "11 experts a token"),
    "no experts": ("mixtral", {"num_local_experts": 0}, "num_experts is below 1"),
    "a text for a number": ("mixtral", {"num_local_experts": "8"}, "num_local_experts is '8'"),
    "a step below 1": ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    "dense layers that are no list": ("qwen2_moe", {"mlp_only_layers": "0"}, "mlp_only_layers is '0'"),
    "fewer experts than the file": ("qwen3_moe", {"num_local_experts": 9}, r"experts\.9\..* is not computed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_make_no_sense_are_refused(case: str, tmp_path: Path) -> None:
    name, changes, message = REFUSED[case]
    oracle_of(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path)


def load(folder: Path) -> Model:
    return load_model(folder, torch.float32, backend="torch")
