"""Families with experts equal transformers: logits, greedy tokens alone and among others, and controls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from diptych.engine.backends.native.supports import supports
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.dtype import KVCacheDtype
from diptych.engine.gpu_precision import describe_matrices, packs_on_gpu
from diptych.engine.loaded_model import BackendChoice, Model, load_model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import LayerWeights, Weights
from diptych.engine.weights.checkpoint import has_kquants, is_quantised, read_checkpoint
from kernels import packed_matrix
from kernels.quantised_linear import dequantise
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


BACKENDS: list[tuple[str, BackendChoice]] = [
    *((name, "torch") for name in CONFIGS),
    *((name, "native") for name, config in CONFIGS.items() if not hasattr(config, "kv_lora_rank")),
]
SAMPLE = {("qwen3_moe", "native"), ("gpt_oss", "native"), ("glm4_moe", "native"), ("deepseek_v3", "torch")}
GREEDY = [
    pytest.param(*one, marks=() if one in SAMPLE else pytest.mark.full, id="-".join(one)) for one in BACKENDS
]
"""Families with backends whose greedy texts are compared; in the short form one of each routing."""


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_all_logits_equal_transformers(name: str, backend: BackendChoice, tmp_path: Path) -> None:
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    model, expected = load(tmp_path, backend), oracle_logits(oracle, LONG)
    for chunk in (len(LONG), 7):
        torch.testing.assert_close(all_logits(model, LONG, chunk), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "backend"), GREEDY)
def test_greedy_tokens_alone_and_among_sixteen_equal_transformers(
    name: str, backend: BackendChoice, tmp_path: Path
) -> None:
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    model = load(tmp_path, backend)
    with recorded_gaps() as gaps:
        together = greedy(model, prompts(), 64)
    if backend == "torch":
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
    "no groups": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "no groups before softmax": ("deepseek_v2", {"topk_method": "greedy"}),
    "scores not sharpened": ("deepseek_v2", {"rope_parameters": {"mscale_all_dim": 0.7}}),
    "another rotation": ("deepseek_v3", {"rope_parameters": {"rope_theta": 500.0}}),
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


def without_latent_norm(layer: LayerWeights) -> LayerWeights:
    assert layer.latent_norm is not None
    return replace(layer, latent_norm=torch.ones_like(layer.latent_norm))


WEIGHTS: dict[str, tuple[str, Callable[[LayerWeights], LayerWeights]]] = {
    "swapped experts": ("qwen3_moe", swapped),
    "swapped experts of chosen softmax": ("granitemoe", swapped),
    "no shared expert": ("glm4_moe", without_shared),
    "no shared expert behind its gate": ("qwen2_moe", without_shared),
    "no correction": ("glm4_moe", without_correction),
    "no sinks": ("gpt_oss", without_sinks),
    "no norm of latents": ("deepseek_v2", without_latent_norm),
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
    "another scoring": ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    "another choice": ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    "weights normalised in V2": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
    "halves for neighbours": ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False"),
    "groups that do not fit": ("deepseek_v3", {"n_group": 5}, "2 of 5 groups of 12 experts"),
    "a latent without numbers": ("deepseek_v3", {"kv_lora_rank": 0}, "rank is below 1"),
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


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_layers_behind_the_model_are_left_out(name: str, tmp_path: Path) -> None:
    """Published folders have one more layer, which drafts; its tensors are no part of the model."""
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layers = oracle.config.num_hidden_layers
    behind = {f"model.layers.{layers}.eh_proj.weight": torch.ones(3, 3)}
    save_file({**tensors, **behind}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for count, fits in ((1, True), (0, False)):
        path.write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
        if fits:
            got = all_logits(load(tmp_path), LONG, 20)
            torch.testing.assert_close(got, oracle_logits(oracle, LONG), atol=1e-4, rtol=0)
        else:
            with pytest.raises(UnsupportedModel, match="eh_proj"):
                load(tmp_path)


def test_mxfp4_folders_give_the_logits_of_their_numbers(tmp_path: Path) -> None:
    """gpt-oss is published so: experts in blocks, all else in full numbers."""
    oracle = oracle_of("gpt_oss-wide")
    generator = torch.Generator().manual_seed(6)
    packed: dict[str, torch.Tensor] = {}
    for name, parameter in oracle.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = parameter.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(119, 123, (experts, outputs, inputs // 32), generator=generator)
        packed |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
        with torch.no_grad():
            numbers = convert_moe_packed_tensors(
                packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32
            )
            parameter.copy_(numbers)
    oracle.save_pretrained(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    kept = {name: t for name, t in plain.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    save_file({**kept, **packed}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **quantised}))
    got = all_logits(load(tmp_path), LONG, 20)
    torch.testing.assert_close(got, oracle_logits(oracle, LONG), atol=1e-4, rtol=0)
    _check_kept_mxfp4(tmp_path)


def _check_kept_mxfp4(folder: Path) -> None:
    """Check that experts are kept in the folder's blocks, and multiplied so by the native step."""
    assert is_quantised(folder)
    assert has_kquants(folder)
    kept, full = (read_checkpoint(folder, kind).weights.layers[0].experts for kind in ("gguf", "fp32"))
    assert kept is not None
    assert full is not None
    for name in ("gates", "ups", "downs"):
        for matrix, numbers in zip(getattr(kept, name), getattr(full, name), strict=True):
            assert matrix.format == "mxfp4"
            assert torch.equal(dequantise(matrix), numbers)
    assert packs_on_gpu(folder)
    packed = read_checkpoint(folder, "packed").weights
    assert describe_matrices(packed, torch.device("cpu")).endswith("of experts in FP4 (E2M1), groups of 32")
    experts = packed.layers[0].experts
    assert experts is not None
    for name in ("gates", "ups", "downs"):
        for matrix, numbers in zip(getattr(experts, name), getattr(full, name), strict=True):
            assert torch.equal(packed_matrix.dequantise(matrix), numbers)
    expected, found = (
        all_logits(load_model(folder, "gguf", backend=backend), LONG, 20) for backend in ("torch", "native")
    )
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.03


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_latents_are_kept_in_full_numbers_only(tmp_path: Path, kind: KVCacheDtype) -> None:
    oracle_of("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"kv-cache-dtype {kind}: latents"):
        load_model(tmp_path, torch.float32, backend="torch", kv_cache=kind)
    layout = load(tmp_path).kv_layout(16)
    assert layout.block_shape == (3, 1, 1, (22 + 10) * 16)


def load(folder: Path, backend: BackendChoice = "torch") -> Model:
    return load_model(folder, torch.float32, backend=backend)


@pytest.mark.parametrize(
    "name", sorted(name for name, config in CONFIGS.items() if hasattr(config, "kv_lora_rank"))
)
def test_latents_are_left_to_torch(name: str, tmp_path: Path) -> None:
    oracle_of(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    assert supports(model.shape) == "attention over latents"
    assert model.backend_name == "torch"
    assert "attention over latents" in str(model.why_torch)
