"""The tensors of a mmproj file (llama.cpp's form) under the names that folders have.

The converter renames tensors, cuts Qwen's joint matrix of q, k and v in three and its kernel of video's
patches in two, and adds one to the norm of Gemma 3's rows; old converters named the two matrices of a
feed-forward in turn. All of it is undone here, so that the encoders know one form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from diptych.engine.models.shape import BadModelFile, UnsupportedModel
from diptych.engine.weights.gguf_file import dequantised
from diptych.engine.weights.gguf_header import GgufTensor, read_header

_TOWER, _VISUAL = "vision_tower.vision_model.", "visual."
_PREFIXES = {
    "idefics3": "model.vision_model.",
    "gemma3": _TOWER,
    "llava": _TOWER,
    "qwen2_vl": _VISUAL,
    "qwen3_vl": _VISUAL,
}
_LAYER = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_TRANSFORMER = {
    "v.class_embd": "embeddings.class_embedding",
    "v.patch_embd.weight": "embeddings.patch_embedding.weight",
    "v.patch_embd.bias": "embeddings.patch_embedding.bias",
    "v.position_embd.weight": "embeddings.position_embedding.weight",
    "v.pre_ln.weight": "pre_layrnorm.weight",
    "v.pre_ln.bias": "pre_layrnorm.bias",
    "v.post_ln.weight": "post_layernorm.weight",
    "v.post_ln.bias": "post_layernorm.bias",
}
_TRANSFORMER_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN = {
    "v.post_ln.weight": "merger.ln_q.weight",
    "v.post_ln.bias": "merger.ln_q.bias",
    "mm.0.weight": "merger.mlp.0.weight",
    "mm.0.bias": "merger.mlp.0.bias",
    "mm.2.weight": "merger.mlp.2.weight",
    "mm.2.bias": "merger.mlp.2.bias",
}
_QWEN3 = {
    "v.patch_embd.bias": "patch_embed.proj.bias",
    "v.position_embd.weight": "pos_embed.weight",
    "v.post_ln.weight": "merger.norm.weight",
    "v.post_ln.bias": "merger.norm.bias",
    "mm.0.weight": "merger.linear_fc1.weight",
    "mm.0.bias": "merger.linear_fc1.bias",
    "mm.2.weight": "merger.linear_fc2.weight",
    "mm.2.bias": "merger.linear_fc2.bias",
}
_DEEP = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
"""Tensors that make rows for the text model's first layers; the number is that of the encoder's layer."""
_QWEN_LAYER = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PLAIN = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_PLAIN3 = {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
_PROJECTOR = "multi_modal_projector."
_PROJECTORS: Mapping[str, Mapping[str, str]] = {
    "idefics3": {"mm.model.fc.weight": "model.connector.modality_projection.proj.weight"},
    "gemma3": {
        "mm.input_projection.weight": f"{_PROJECTOR}mm_input_projection_weight",
        "mm.soft_emb_norm.weight": f"{_PROJECTOR}mm_soft_emb_norm.weight",
    },
    "llava": {
        f"mm.{number}.{kind}": f"{_PROJECTOR}linear_{place}.{kind}"
        for place, number in ((1, 0), (2, 2))
        for kind in ("weight", "bias")
    },
    "qwen2_vl": {},
    "qwen3_vl": {},
}
_FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The kernel of each frame of Qwen's patches."""
_LESS_ONE = "mm.soft_emb_norm.weight"
"""A norm that folders store less one."""


@dataclass(frozen=True)
class _Made:
    """A tensor of a folder, made of tensors of the file."""

    parts: tuple[str, ...]
    stacked: bool = False
    """The parts are frames, one behind another in the third axis; else rows one after another."""


class MmprojTensors:
    """The tensors of a mmproj file by the names of a folder, each read when asked for."""

    def __init__(self, path: Path, family: str) -> None:
        """Open the file of a model of `family` (`ImageSpec.family`).

        Raises BadModelFile, and UnsupportedModel for a tensor that no encoder of the family has.
        """
        self._file, self._tensors = path.name, read_header(path).tensors
        self._family = family
        self._made = _names(family, self._tensors)
        taken = {part for made in self._made.values() for part in made.parts}
        for name in self._tensors:
            if name not in taken:
                raise UnsupportedModel(f"{self._file}: tensor {name} is not computed")

    def names(self) -> list[str]:
        """Return the names of all tensors, in order."""
        return sorted(self._made)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in float32. Raises BadModelFile for one that the file lacks."""
        made = self._made.get(name)
        missing = [part for part in (made.parts if made else ()) if part not in self._tensors]
        if made is None or missing:
            raise BadModelFile(f"{self._file}: no tensor {missing[0] if missing else 'for ' + name}")
        parts = [self._numbers(part) for part in made.parts]
        if made.stacked:
            return torch.stack(parts, dim=2)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def stored_name(self, name: str) -> str:
        """Return what the file calls a tensor."""
        made = self._made.get(name)
        return f"{name} ({' and '.join(made.parts)} of {self._file})" if made else name

    def _numbers(self, name: str) -> torch.Tensor:
        numbers = dequantised(self._tensors[name])
        return numbers - 1.0 if name == _LESS_ONE else numbers


def _names(family: str, tensors: Mapping[str, GgufTensor]) -> dict[str, _Made]:
    """Return what makes each tensor of a folder; a tensor whose name is not known makes none."""
    prefix = _PREFIXES[family]
    qwen = prefix == _VISUAL
    fields, layer = _TRANSFORMER, _TRANSFORMER_LAYER
    if family == "qwen2_vl":
        fields, layer = _QWEN, {**_QWEN_LAYER, **(_GATED if _is_gated(tensors) else _PLAIN)}
    elif family == "qwen3_vl":
        fields, layer = _QWEN3, {**_QWEN_LAYER, **_PLAIN3}
    turned = _are_turned(tensors)
    made: dict[str, _Made] = {}
    for name in tensors:
        if name in _PROJECTORS[family]:
            made[_PROJECTORS[family][name]] = _Made((name,))
        elif name in fields:
            made[prefix + fields[name]] = _Made((name,))
        elif found := _LAYER.fullmatch(name):
            number, field, kind = found.groups()
            at = f"{prefix}{'blocks' if qwen else 'encoder.layers'}.{number}."
            if qwen and field in ("attn_q", "attn_k", "attn_v"):
                parts = tuple(f"v.blk.{number}.attn_{part}.{kind}" for part in "qkv")
                made[f"{at}attn.qkv.{kind}"] = _Made(parts)
            elif field in layer:
                own = turned.get(field, field)
                made[f"{at}{layer[own]}.{kind}"] = _Made((name,))
    if family == "qwen3_vl":
        made |= _deep_names(tensors)
    if qwen and any(name in tensors for name in _FRAMES):
        made[f"{prefix}patch_embed.proj.weight"] = _Made(_FRAMES, stacked=True)
    return made


def _deep_names(tensors: Mapping[str, GgufTensor]) -> dict[str, _Made]:
    """Return the tensors of rows for the text model's first layers, whose number folders count from 0."""
    found = [match for name in tensors if (match := _DEEP.fullmatch(name))]
    numbers = {layer: number for number, layer in enumerate(sorted({int(match[1]) for match in found}))}
    return {
        f"{_VISUAL}deepstack_merger_list.{numbers[int(match[1])]}."
        f"{match[2].replace('fc', 'linear_fc')}.{match[3]}": _Made((match[0],))
        for match in found
    }


def _is_gated(tensors: Mapping[str, GgufTensor]) -> bool:
    return "v.blk.0.ffn_gate.weight" in tensors


def _are_turned(tensors: Mapping[str, GgufTensor]) -> dict[str, str]:
    """Return the two matrices of a feed-forward in turn, where the first narrows; none where it widens."""
    norm, up = tensors.get("v.blk.0.ln1.weight"), tensors.get("v.blk.0.ffn_up.weight")
    if norm is None or up is None or up.shape[-1] == norm.shape[-1]:
        return {}
    return {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
