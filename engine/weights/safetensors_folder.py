"""Weights from a Hugging Face folder: config.json and one or more safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.precision import PLAIN, Precision
from engine.shape import UnsupportedModel
from engine.weights.blocks import in_precision
from engine.weights.canonical import BadModelFile, Checkpoint, Matrix, assemble
from engine.weights.hf_config import eos_ids, read_config, shape_from_config
from engine.weights.kv_scales import is_kv_scale, read_kv_scales
from engine.weights.leftovers import refuse_leftovers
from engine.weights.quantised_folder import refuse_quantised

_MODEL_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
_LAYER_PREFIX = "model.layers."


def read_folder(folder: Path, precision: Precision) -> Checkpoint:
    """Read a model folder. Raises UnsupportedModel or BadModelFile; only safetensors are read, never a
    pickle.
    """
    config = read_config(folder)
    if precision == "gguf":
        raise UnsupportedModel(
            "dtype gguf keeps the blocks of a GGUF file; this is a folder with safetensors"
        )
    tensors = _TensorFiles(folder)
    dtypes = tensors.dtypes()
    refuse_quantised(config, _json_object(folder / "hf_quant_config.json"), dtypes)
    tied = bool(config.get("tie_word_embeddings")) and not _own_head(tensors)
    shape = shape_from_config(config, tied=tied)
    refuse_leftovers(filter(_may_be_left, dtypes), shape, _LAYER_PREFIX, _LAYER_NAMES)

    def read(name: str) -> Matrix:
        stored = "embed" if name == "head" and tied else name
        return in_precision(name, tensors.read(_stored_name(stored)), precision)

    eos = eos_ids(_json_object(folder / "generation_config.json"), config)
    own_head = not tied or precision not in PLAIN
    weights = assemble(shape, read, own_head=own_head)
    return Checkpoint(shape, weights, eos, read_kv_scales(shape, tensors.has, tensors.read))


def _may_be_left(name: str) -> bool:
    """Whether only the shape can say that a tensor is read. The angles are ours to make, and what lies beside
    the model (a value head, say) is no part of it.
    """
    if not name.startswith(("model.", "lm_head.")) or name in _MODEL_NAMES.values():
        return False
    return not name.endswith("rotary_emb.inv_freq") and not is_kv_scale(name)


def _own_head(tensors: _TensorFiles) -> bool:
    """Whether there is an output matrix that is not the embedding once more: then it counts, as it does for
    transformers, though the config ties them.
    """
    head, embed = _MODEL_NAMES["head"], _MODEL_NAMES["embed"]
    if not tensors.has(head):
        return False
    own, tied = tensors.read(head), tensors.read(embed)
    return own.dtype != tied.dtype or not torch.equal(own, tied)


def _stored_name(name: str) -> str:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, layer, field = name.split(".")
    return f"{_LAYER_PREFIX}{layer}.{_LAYER_NAMES[field]}"


class _TensorFiles:
    """All tensors of a folder by name, each read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                handle: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise BadModelFile(f"{path.name}: {error}") from error
            self._files |= dict.fromkeys(handle.keys(), handle)

    def dtypes(self) -> dict[str, str]:
        """The type of each tensor, as safetensors names it: the headers say, no data is read."""
        return {name: handle.get_slice(name).get_dtype() for name, handle in self._files.items()}

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise BadModelFile(f"tensor {name} is missing")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    """One file counts before an index, as for transformers: an earlier model may have left the index."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    names = set(_json_object(index).get("weight_map", {}).values())
    for name in names:
        # A name with a separator could reach outside of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise BadModelFile("the weight index names a file outside of its folder")
    return [folder / name for name in sorted(names)]


def _json_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadModelFile(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path.name} is not an object")
    return value
