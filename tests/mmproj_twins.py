"""The tiny models with images as pairs of GGUF files, in the way of llama.cpp's converter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests import vision_models
from tests.diptych.engine.models.gguf_twins import Twin, add_parameters, write_metadata
from tests.diptych.engine.weights.gguf_files import add_value, finish
from tests.diptych.runtime.tokenizer.gguf_twins import add_byte_level

FAMILIES = ("idefics3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "gemma3")
_TEXTS = {
    "idefics3": Twin("llama", "llama", permuted=True),
    "llava": Twin("llama", "llama", permuted=True),
    "qwen2_5_vl": Twin("qwen2", "qwen2vl", metadata=lambda config: _sections(config)),
    "qwen2_vl": Twin("qwen2", "qwen2vl", metadata=lambda config: _sections(config)),
    "qwen3_vl": Twin("qwen3", "qwen3vl", metadata=lambda config: _sections(config)),
    "gemma3": Twin(
        "gemma3_text",
        "gemma3",
        metadata=lambda config: {"attention.sliding_window": config.sliding_window},
        less_one=True,
    ),
}
Tensors = dict[str, np.ndarray]
Keys = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Files of a model."""

    text: Path
    mmproj: Path


def write(family: str, folder: Path, at: Path) -> Pair:
    """Write the twin of the model in `folder` to the folder `at`."""
    oracle = vision_models.oracle(family, folder)
    pair = Pair(at / "model.gguf", at / "mmproj-model.gguf")
    _write_text(family, oracle, folder, pair.text)
    write_mmproj(pair.mmproj, *mmproj(family, oracle, folder))
    return pair


def with_windows_only(folder: Path, copy: Path) -> Path:
    """Copy a Gemma 3 whose layers all have a window; return the copy."""
    shutil.copytree(folder, copy)
    text = json.loads((folder / "config.json").read_bytes())["text_config"]
    kinds = ["sliding_attention"] * text["num_hidden_layers"]
    vision_models.rewrite(copy / "config.json", {"text_config": {**text, "layer_types": kinds}})
    return copy


def write_mmproj(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a mmproj file; return its path."""
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in keys.items():
        add_value(writer, key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    finish(writer)
    return path


def mmproj(family: str, oracle: Any, folder: Path) -> tuple[Keys, Tensors]:
    """Return keys and tensors of a model's mmproj file."""
    names, made = _NAMES[family]
    tensors: Tensors = {}
    for name, parameter in oracle.named_parameters():
        if _is_text(name):
            continue
        array = parameter.detach().numpy()
        stored = name.removeprefix("model.")
        for theirs, ours in names:
            stored = stored.replace(theirs, ours)
        tensors |= made(stored, array)
    keys = {"clip.has_vision_encoder": True, "clip.projector_type": _PROJECTORS[family]}
    return keys | {
        f"clip.vision.{key}": value for key, value in _fields(family, oracle, folder).items()
    }, tensors


_PROJECTORS = {
    "idefics3": "idefics3",
    "llava": "mlp",
    "gemma3": "gemma3",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen2_vl": "qwen2vl_merger",
    "qwen3_vl": "qwen3vl_merger",
}
_TRANSFORMER = (
    ("vision_model.", "v."),
    ("vision_tower.", "v."),
    ("embeddings.class_embedding", "class_embd"),
    ("embeddings.patch_embedding", "patch_embd"),
    ("embeddings.position_embedding", "position_embd"),
    ("pre_layrnorm", "pre_ln"),
    ("post_layernorm", "post_ln"),
    ("encoder.layers", "blk"),
    ("layer_norm1", "ln1"),
    ("layer_norm2", "ln2"),
    ("self_attn.out_proj", "attn_out"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("connector.modality_projection.proj", "mm.model.fc"),
    ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
    ("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
)
_LLAVA = (
    *_TRANSFORMER[:-5],
    ("mlp.fc1", "ffn_down"),  # as its converter calls them
    ("mlp.fc2", "ffn_up"),
    ("multi_modal_projector.linear_1", "mm.0"),
    ("multi_modal_projector.linear_2", "mm.2"),
)
_QWEN = (
    ("visual.", "v."),
    ("v.merger.ln_q", "v.post_ln"),
    ("v.merger.mlp", "mm"),
    ("blocks", "blk"),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("attn.proj", "attn_out"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
)


_QWEN3 = (
    ("visual.", "v."),
    *((f"v.deepstack_merger_list.{at}", f"v.deepstack.{layer}") for at, layer in ((0, 0), (1, 1))),
    ("v.merger.norm", "v.post_ln"),
    ("v.merger.linear_fc1", "mm.0"),
    ("v.merger.linear_fc2", "mm.2"),
    ("v.pos_embed", "v.position_embd"),
    ("blocks", "blk"),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    (".linear_fc", ".fc"),
    ("v.patch_embed.proj.bias", "v.patch_embd.bias"),
)


def _as_it_is(name: str, array: np.ndarray) -> Tensors:
    return {name: array + 1 if name == "mm.soft_emb_norm.weight" else array}


def _without_last_layer(name: str, array: np.ndarray) -> Tensors:
    return {} if name.startswith(("v.blk.3.", "v.post_ln")) else {name: array}


def _cut(name: str, array: np.ndarray) -> Tensors:
    if name == "v.patch_embed.proj.weight":
        return {"v.patch_embd.weight": array[:, :, 0], "v.patch_embd.weight.1": array[:, :, 1]}
    if ".attn.qkv." in name:
        parts = zip("qkv", np.split(array, 3), strict=True)
        return {name.replace("attn.qkv", f"attn_{part}"): rows for part, rows in parts}
    return {name: array}


_NAMES: dict[str, tuple[tuple[tuple[str, str], ...], Callable[[str, np.ndarray], Tensors]]] = {
    "idefics3": (_TRANSFORMER, _as_it_is),
    "gemma3": (_TRANSFORMER, _as_it_is),
    "llava": (_LLAVA, _without_last_layer),
    "qwen2_5_vl": (_QWEN, _cut),
    "qwen2_vl": (_QWEN, _cut),
    "qwen3_vl": (_QWEN3, _cut),
}


def _fields(family: str, oracle: Any, folder: Path) -> Keys:
    vision, saved = oracle.config.vision_config, _processor(folder)
    common = {
        "embedding_length": vision.hidden_size,
        "attention.layer_norm_epsilon": getattr(vision, "layer_norm_eps", 1e-6),
        "patch_size": vision.patch_size,
        "image_mean": [float(value) for value in saved["image_mean"]],
        "image_std": [float(value) for value in saved["image_std"]],
    }
    if family in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl"):
        size, own = saved["size"], {}
        if family == "qwen2_5_vl":
            own = {"n_wa_pattern": 2, "window_size": vision.window_size}
        elif family == "qwen3_vl":
            deep = vision.deepstack_visual_indexes
            own = {"is_deepstack_layers": [layer in deep for layer in range(vision.depth)]}
        return {
            **common,
            **own,
            "embedding_length": vision.embed_dim if family == "qwen2_vl" else vision.hidden_size,
            "feed_forward_length": 72,  # of Qwen2-VL another number than that of its tensors
            "block_count": vision.depth,
            "attention.head_count": vision.num_heads,
            "image_size": 560,
            "image_min_pixels": size["shortest_edge"],
            "image_max_pixels": size["longest_edge"],
        }
    common |= {
        "feed_forward_length": vision.intermediate_size,
        "block_count": vision.num_hidden_layers,
        "attention.head_count": vision.num_attention_heads,
        "image_size": vision.image_size,
    }
    if family == "llava":
        return {**common, "block_count": 3, "feature_layer": [3]}
    if family == "gemma3":
        return {**common, "projector.scale_factor": 2}
    return {
        **common,
        "projector.scale_factor": oracle.config.scale_factor,
        "preproc_image_size": saved["size"]["longest_edge"],
    }


def _is_text(name: str) -> bool:
    return name.startswith(("lm_head", "model.language_model.", "model.text_model."))


def _processor(folder: Path) -> dict[str, Any]:
    both = folder / "processor_config.json"
    path = both if both.exists() else folder / "preprocessor_config.json"
    saved: dict[str, Any] = json.loads(path.read_bytes())
    return saved.get("image_processor", saved)


def _sections(config: Any) -> dict[str, object]:
    return {"rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0]}


def _write_text(family: str, oracle: Any, folder: Path, path: Path) -> None:
    twin, config = _TEXTS[family], oracle.config.text_config
    writer = gguf.GGUFWriter(path, twin.architecture)
    write_metadata(writer, config, twin)
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    add_byte_level(writer, spec, "gpt-2")
    writer.add_eos_token_id(oracle.generation_config.eos_token_id)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    add_parameters(writer, config, twin, _text_parameters(oracle))
    finish(writer)


def _text_parameters(oracle: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of the text model by the names that they have without the encoder."""
    for name, parameter in oracle.named_parameters():
        if _is_text(name):
            text = name.replace("model.language_model.", "model.").replace("model.text_model.", "model.")
            yield text, parameter
