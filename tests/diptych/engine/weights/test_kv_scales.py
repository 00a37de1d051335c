"""Scales of an FP8 cache: the checkpoint's where it has them, 1 where it has none, refused when odd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model, load_model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.runner import Runner
from diptych.engine.weights import BadModelFile
from diptych.engine.weights.checkpoint import read_checkpoint
from kernels.fp8_cache import DTYPE

LAYERS, KV_HEADS = 2, 2
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=256,
    initializer_range=0.3,
)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    return tmp_path


def add(folder: Path, **scales: torch.Tensor) -> None:
    """Put tensors `self_attn.<name>` into every layer; `__` in a name stands for a dot."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(LAYERS):
        for name, scale in scales.items():
            full = f"model.layers.{layer}.self_attn.{name.replace('__', '.')}"
            tensors[full] = scale * (layer + 1)
    save_file(tensors, path, {"format": "pt"})


def quantization(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", **fields}
    path.write_text(json.dumps(config))


def logits(model: Model) -> torch.Tensor:
    layout = model.kv_layout(16)
    step = SequenceStep(KVMemory(layout, 2), [1, 0], 0, list(range(20)), True)
    return Runner(model, 1).step([step])


def test_one_scale_a_layer_is_that_of_all_its_heads(folder: Path) -> None:
    add(folder, k_scale=torch.tensor(0.5), v_scale=torch.tensor([0.25]))
    quantization(folder, kv_cache_scheme=SCHEME, config_groups={})
    found = read_checkpoint(folder, "fp32").kv_scales
    assert found is not None
    assert found.tolist() == [[[0.5, 0.5], [0.25, 0.25]], [[1.0, 1.0], [0.5, 0.5]]]


def test_a_scale_a_head_and_the_other_names(folder: Path) -> None:
    add(folder, k_proj__k_scale=torch.tensor([0.5, 2.0]), v_proj__v_scale=torch.ones(KV_HEADS, 1, 1))
    found = read_checkpoint(folder, "fp32").kv_scales
    assert found is not None
    assert found[0].tolist() == [[0.5, 2.0], [1.0, 1.0]]


def test_missing_scales_are_1_and_change_logits_little(
    folder: Path,
) -> None:
    plain, kept = (load_model(folder, "fp32", backend="torch", kv_cache=kind) for kind in ("auto", "fp8"))
    assert (plain.dtype, kept.dtype) == (torch.float32, DTYPE)
    assert kept.kv_layout(16).bytes_per_block * 4 == plain.kv_layout(16).bytes_per_block
    exact, near = logits(plain), logits(kept)
    assert 1e-4 < float((near - exact).norm() / exact.norm()) < 0.2
    add(folder, k_scale=torch.tensor(1e-4), v_scale=torch.tensor(1e-4))
    far = logits(load_model(folder, "fp32", backend="torch", kv_cache="fp8"))  # 0.0448 is the largest now
    assert float((far - exact).norm() / exact.norm()) > 0.5


@pytest.mark.parametrize(
    ("scale", "match"),
    [(torch.ones(3), "3 scales for 2 KV heads"), (torch.tensor(-1.0), "is not a positive number")],
)
def test_odd_scales_are_refused_by_name(folder: Path, scale: torch.Tensor, match: str) -> None:
    add(folder, k_scale=scale, v_scale=torch.tensor(1.0))
    with pytest.raises(BadModelFile, match=f"self_attn.k_scale.*{match}"):
        read_checkpoint(folder, "fp32")


def test_one_kind_of_scales_alone_is_refused(folder: Path) -> None:
    add(folder, k_scale=torch.tensor(1.0))
    with pytest.raises(BadModelFile, match=r"layers\.0\.self_attn\.v_scale is missing"):
        read_checkpoint(folder, "fp32")


def test_quantised_weights_are_still_refused(folder: Path) -> None:
    quantization(folder, kv_cache_scheme=SCHEME, config_groups={"group_0": {"targets": ["Linear"]}})
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        read_checkpoint(folder, "fp32")
