"""Files of EAGLE heads of the first kind, which EAGLE-2 has as well, and the checks that they are a model's.

Published files are a folder with config.json, that of a Llama of one layer, and safetensors: `fc.weight`,
perhaps `fc.bias`, `layers.0.self_attn.*`, `layers.0.mlp.*` and `layers.0.post_attention_layernorm.weight`;
`embed_tokens.weight` and `lm_head.weight` where these are not the model's. The layer has no first norm. In
vLLM's form the Llama's config lies within, as `model`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from diptych.engine.heads.head_files import BadHeads, layer_shape, read_config
from diptych.engine.heads.head_tensors import HeadTensors
from diptych.engine.heads.layer_head import HeadInputs, LayerHead
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import LayerWeights, Weights

_PREFIXES: Final = ("", "model.")
_LAYER: Final = tuple(f"{prefix}layers.0." for prefix in _PREFIXES)
_FC, _QUERIES = "fc.weight", "layers.0.self_attn.q_proj.weight"
_KNOWN: Final = (
    {
        "fc.weight",
        "fc.bias",
        "embed_tokens.weight",
        "lm_head.weight",
        "layers.0.self_attn.rotary_emb.inv_freq",
    }
    | {f"layers.0.self_attn.{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")}
    | {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    | {"layers.0.post_attention_layernorm.weight"}
)
_AUTHORS: Final = {"add_para_norm": False, "skip_prenorm": True, "skip_output_norm": True}
"""Fields of vLLM's configs, with the values that the authors' heads have."""


def is_eagle(path: Path) -> bool:
    """Return whether a folder holds such a head: by its config as vLLM and SGLang name it, or as the authors'
    files are known, by `fc.weight` beside a layer.
    """
    try:
        config = read_config(path)
    except BadHeads:
        return False
    if "speculators_model_type" in config:
        return False
    named = json.dumps([config.get("model_type"), config.get("architectures")]).lower()
    if "eagle" in named:
        return "eagle3" not in named
    if config.get("num_hidden_layers") != 1:
        return False
    names = _tensor_names(path)
    return all(any(prefix + name in names for prefix in _PREFIXES) for name in (_FC, _QUERIES))


def read_eagle(
    path: Path,
    model: ModelShape,
    embed: torch.Tensor,
    output_matrix: Callable[[], torch.Tensor],
    dtype: torch.dtype,
) -> LayerHead:
    """Read the head of a model of shape `model` and embedding `embed` in `dtype`.

    `output_matrix` gives the model's own, `[vocab, hidden]`, where the files have none. Raises BadHeads.
    """
    config = read_config(path)
    shape = layer_shape(path, _of_layer(path, config), model)
    if shape.hidden_size != model.hidden_size:
        raise BadHeads(f"{path}: a head of width {shape.hidden_size}, the model's is {model.hidden_size}")
    files = HeadTensors(path, dtype)
    _check_names(files)
    hidden, matrix = shape.hidden_size, (model.vocab_size, shape.hidden_size)
    own_embed = files.optional(_PREFIXES, "embed_tokens.weight", matrix)
    own_head = files.optional(_PREFIXES, "lm_head.weight", matrix)
    weights = Weights(
        embed=embed.to(dtype) if own_embed is None else own_embed,
        layers=(_layer(files, shape),),
        final_norm=torch.empty(0),
        head=output_matrix().to(dtype) if own_head is None else own_head,
    )
    inputs = HeadInputs(
        files.named(_PREFIXES, _FC, (hidden, 2 * hidden)), files.optional(_PREFIXES, "fc.bias", (hidden,))
    )
    shape = replace(shape, logit_scale=model.logit_scale, logit_cap=model.logit_cap)
    return LayerHead(shape, weights, inputs, (model.num_layers,), normed=False)


def _of_layer(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the head's layer. Raises BadHeads for a head that is more than the authors'."""
    within = config.get("model")
    fields = within if isinstance(within, dict) else config
    for field, value in _AUTHORS.items():
        if fields.get(field, value) != value:
            raise BadHeads(f"{path}: {field} {fields[field]!r} is not computed")
    cut = config.get("truncated_vocab_size", fields.get("vocab_size"))
    if cut != fields.get("vocab_size"):
        raise BadHeads(f"{path}: truncated_vocab_size {cut} is not computed")
    return fields


def _layer(files: HeadTensors, shape: ModelShape) -> LayerWeights:
    hidden, inner, queries = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    pairs = shape.num_kv_heads * shape.head_dim
    rows = {"q": queries, "k": pairs, "v": pairs, "o": hidden}
    biases = {
        name: files.optional(_LAYER, f"self_attn.{name}_proj.bias", (count,)) for name, count in rows.items()
    }
    if len({biases[name] is None for name in "qkv"}) > 1:
        raise BadHeads(f"{files.path} has biases of some of q_proj, k_proj and v_proj only")
    return LayerWeights(
        q=files.named(_LAYER, "self_attn.q_proj.weight", (queries, hidden)),
        k=files.named(_LAYER, "self_attn.k_proj.weight", (pairs, hidden)),
        v=files.named(_LAYER, "self_attn.v_proj.weight", (pairs, hidden)),
        o=files.named(_LAYER, "self_attn.o_proj.weight", (hidden, queries)),
        post_norm=files.named(_LAYER, "post_attention_layernorm.weight", (hidden,)),
        gate=files.named(_LAYER, "mlp.gate_proj.weight", (inner, hidden)),
        up=files.named(_LAYER, "mlp.up_proj.weight", (inner, hidden)),
        down=files.named(_LAYER, "mlp.down_proj.weight", (hidden, inner)),
        q_bias=biases["q"],
        k_bias=biases["k"],
        v_bias=biases["v"],
        o_bias=biases["o"],
    )


def _check_names(files: HeadTensors) -> None:
    """Raise BadHeads for a tensor that would not be read: its head gives other numbers without it."""
    for name in files.names:
        if not any(name.removeprefix(prefix) in _KNOWN for prefix in _PREFIXES):
            raise BadHeads(f"{files.path}: tensor {name} is not computed: an EAGLE head has no such tensor")


def _tensor_names(path: Path) -> set[str]:
    """Return the names of a folder's tensors, from the files' headers; none where they are broken."""
    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                names |= set(opened.keys())
        except (SafetensorError, OSError):
            return set()
    return names
