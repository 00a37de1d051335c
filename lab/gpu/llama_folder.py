"""A Hugging Face folder of a Llama shape with random weights: a service needs files, and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from diptych.engine.models.shape import ModelShape
from diptych.runtime.settings import resolve_model

_LAYERS_A_FILE = 8


def write_llama_folder(folder: Path, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Path:
    """Write config, shards and the bundled model's tokenizer, whose tokens are fewer than the model's.

    The weights are made on `device`. Needs transformers.
    """
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    bundled = resolve_model("bundled")
    AutoTokenizer.from_pretrained(bundled.parent, gguf_file=bundled.name).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    weight_map: dict[str, str] = {}
    for number, sizes in enumerate(_shards(shape)):
        name = f"model-{number:05d}.safetensors"
        save_file({key: _tensor(key, size, device, dtype) for key, size in sizes.items()}, folder / name)
        weight_map |= dict.fromkeys(sizes, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rotations[0].theta,
        "max_position_embeddings": shape.max_context,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _shards(shape: ModelShape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the tensors of each file: names and sizes."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for first in range(0, shape.num_layers, _LAYERS_A_FILE):
        yield {
            f"model.layers.{number}.{name}.weight": size
            for number in range(first, min(first + _LAYERS_A_FILE, shape.num_layers))
            for name, size in layer.items()
        }
    matrix = (shape.vocab_size, hidden)
    yield {"model.embed_tokens.weight": matrix, "model.norm.weight": (hidden,), "lm_head.weight": matrix}


def _tensor(name: str, size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return weights that keep activations about one."""
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    return torch.randn(size, dtype=dtype, device=device).mul_(size[-1] ** -0.5).cpu()
