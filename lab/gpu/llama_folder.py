"""A Hugging Face folder of a Llama shape with random weights: a service needs files, and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from diptych.engine.models.shape import ModelShape
from diptych.runtime.settings import resolve_model
from lab.gpu import awq

_LAYERS_A_FILE = 8


Sizes = Mapping[str, tuple[int, ...]]
"""Tensors of a file by name."""
Make = Callable[[str, tuple[int, ...]], Mapping[str, torch.Tensor]]
"""Returns what stands in a file for a tensor of a name and size."""


def write_llama_folder(
    folder: Path,
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    awq_group: int | None = None,
) -> Path:
    """Write config, shards and the bundled model's tokenizer, whose tokens are fewer than the model's.

    The weights are made on `device`; with `awq_group` matrices of layers are AWQ's, so many inputs a group.
    Needs transformers.
    """
    config = decoder_config(shape, "LlamaForCausalLM", "llama")
    make: Make = partial(random_tensor, device=device, dtype=dtype)
    if awq_group is not None:
        config["quantization_config"] = awq.config(awq_group)
        make = partial(awq.tensors, plain=make, group=awq_group, device=device)
    return write_folder(folder, config, _shards(shape), make)


def write_folder(folder: Path, config: Mapping[str, object], shards: Iterable[Sizes], make: Make) -> Path:
    """Write a folder of `config` and the tensors that `make` makes of each file's sizes, with a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for number, sizes in enumerate(shards):
        name = f"model-{number:05d}.safetensors"
        made = {key: tensor for one, size in sizes.items() for key, tensor in make(one, size).items()}
        save_file(made, folder / name)
        weight_map |= dict.fromkeys(made, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    bundled = resolve_model("bundled")
    AutoTokenizer.from_pretrained(bundled.parent, gguf_file=bundled.name).save_pretrained(folder)


def decoder_config(shape: ModelShape, architecture: str, model_type: str) -> dict[str, object]:
    """Return the fields of config.json that Llama and its kin share."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
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


def attention_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of a layer's norms and matrices of attention, by their names below it."""
    hidden = shape.hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
    }


def outer_sizes(shape: ModelShape) -> Sizes:
    """Return the sizes of the tensors outside of layers."""
    matrix = (shape.vocab_size, shape.hidden_size)
    return {
        "model.embed_tokens.weight": matrix,
        "model.norm.weight": (shape.hidden_size,),
        "lm_head.weight": matrix,
    }


def _shards(shape: ModelShape) -> Iterator[Sizes]:
    """Yield the tensors of each file: names and sizes."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    layer = attention_sizes(shape) | {
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
    yield outer_sizes(shape)


def random_tensor(
    name: str, size: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return weights of this name that keep activations about one."""
    if len(size) == 1:
        return {name: torch.ones(size, dtype=dtype)}
    return {name: torch.randn(size, dtype=dtype, device=device).mul_(size[-1] ** -0.5).cpu()}
