"""Quantised folders of models with experts: their matrices, and those of latents, are read by the scheme."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from diptych.engine.gpu_precision import describe_matrices
from diptych.engine.loaded_model import load_model
from diptych.engine.weights.checkpoint import read_checkpoint
from kernels.quantised_linear import BlockMatrix
from tests.diptych.engine.models.expert_models import all_logits, oracle_logits, oracle_of, prompts
from tests.diptych.engine.weights.quantised_folders import gptq

LONG = prompts()[-1]
_EXPERT = re.compile(r".*\.(mlp\.experts\.\d+\.(gate|up|down)_proj|self_attn\.[qkvo]_proj)\.weight")


def with_config(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def test_gptq_experts_are_read_and_kept_in_their_codes(tmp_path: Path) -> None:
    oracle = oracle_of("qwen3_moe-wide")
    oracle.save_pretrained(tmp_path)
    torch.manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    full: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if _EXPERT.fullmatch(name) is None:
            tensors[name] = full[name] = tensor
            continue
        made = gptq()(*tensor.shape)
        full[name] = made.numbers
        tensors |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in made.parts.items()}
    save_file(full, tmp_path / "model.safetensors")
    expected = all_logits(load_model(tmp_path, torch.float32, backend="torch"), LONG, 40)
    save_file(tensors, tmp_path / "model.safetensors")
    with_config(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    got = all_logits(load_model(tmp_path, torch.float32, backend="torch"), LONG, 40)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    kept = read_checkpoint(tmp_path, "gguf").weights.layers[1].experts
    assert kept is not None
    for matrix in kept.gates + kept.downs:
        assert isinstance(matrix, BlockMatrix)
        assert matrix.format == "q4_1"
    assert kept.router.dtype == torch.float32
    described = describe_matrices(read_checkpoint(tmp_path, "packed").weights, torch.device("cpu"))
    assert described.endswith("of experts in 4-bit codes, groups of 32")


def test_fp8_latents_and_experts_are_read(tmp_path: Path) -> None:
    """DeepSeek-V3 is published so: every matrix but router, embedding and head, a scale a rectangle."""
    oracle = oracle_of("deepseek_v3")
    oracle.save_pretrained(tmp_path)
    size = 16
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith("proj.weight") and "kv_a_proj_with_mqa.weight" not in name:
            tensors[name] = state[name] = tensor
            continue
        rows, columns = tensor.shape
        scales = torch.rand(-(-rows // size), -(-columns // size)) * 0.3 + 0.1
        spread = scales.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
        stored = (tensor / spread).to(torch.float8_e4m3fn)
        tensors |= {name: stored, f"{name}_scale_inv": scales}
        state[name] = stored.float() * spread
    save_file(state, tmp_path / "model.safetensors")
    exact = type(oracle).from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager"
    )
    save_file(tensors, tmp_path / "model.safetensors")
    with_config(tmp_path, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [size, size]})
    got = all_logits(load_model(tmp_path, torch.float32, backend="torch"), LONG, 40)
    torch.testing.assert_close(got, oracle_logits(exact.eval().float(), LONG), atol=1e-4, rtol=0)
