"""Files of EAGLE-3 heads (eagle3.py), and the checks that they are a model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from diptych.engine.heads.head_files import BadHeads, layer_shape, read_config
from diptych.engine.heads.head_tensors import HeadTensors
from diptych.engine.models.shape import ModelShape

DRAFT_VOCAB: Final = "draft_vocab_size"
_LAYER: Final = ("midlayer.", "layers.0.", "model.layers.0.", "model.midlayer.")
_PLAIN: Final = ("", "model.")


@dataclass(frozen=True)
class Eagle3Weights:
    """Weights of a head, all of one type."""

    embed: torch.Tensor
    """`[vocab, hidden]`, the model's own where the files have none."""
    fc: torch.Tensor
    """`[hidden, taps * the model's hidden]`."""
    hidden_norm: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    norm: torch.Tensor
    qkv: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    """Matrices `[width, 2 * hidden]` and biases of queries, keys and values."""
    output: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    lm_head: torch.Tensor
    """`[draft vocab, hidden]`."""
    draft_tokens: torch.Tensor
    """int64 `[draft vocab]`: the model's number of each drafted token."""
    layers: tuple[int, ...]
    """Layers of the model before which the residual stream is read."""
    norm_before_residual: bool
    """True if the residual of the layer begins with the normed feature."""


def is_eagle3(path: Path) -> bool:
    """Return whether a folder's config.json is that of an EAGLE-3 head, as the authors name them."""
    try:
        config = read_config(path)
    except BadHeads:
        return False
    named = config.get("architectures")
    return DRAFT_VOCAB in config or (isinstance(named, list) and any("Eagle3" in str(one) for one in named))


def read_eagle3(
    path: Path, model: ModelShape, embed: torch.Tensor, dtype: torch.dtype
) -> tuple[ModelShape, Eagle3Weights]:
    """Read the head of a model of shape `model` and embedding `embed` in `dtype`. Raises BadHeads."""
    config = read_config(path)
    shape = layer_shape(path, config, model)
    layers = _tapped(path, config, model.num_layers)
    files = HeadTensors(path, dtype)
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    kv, inner = shape.num_kv_heads * shape.head_dim, shape.intermediate_size
    drafts = config.get(DRAFT_VOCAB) or model.vocab_size
    own = files.find(_PLAIN, "embed_tokens.weight")
    if own is None and embed.shape[1] != hidden:
        raise BadHeads(f"{path}: without embed_tokens.weight its width {hidden} has to be {embed.shape[1]}")
    weights = Eagle3Weights(
        embed=embed if own is None else files.sized(own, (model.vocab_size, hidden)),
        fc=files.named(_PLAIN, "fc.weight", (hidden, len(layers) * model.hidden_size)),
        hidden_norm=files.named(_LAYER, "hidden_norm.weight", (hidden,)),
        input_norm=files.named(_LAYER, "input_layernorm.weight", (hidden,)),
        post_norm=files.named(_LAYER, "post_attention_layernorm.weight", (hidden,)),
        norm=files.named(_PLAIN, "norm.weight", (hidden,)),
        qkv=[
            _projection(files, name, (rows, 2 * hidden))
            for name, rows in zip("qkv", (width, kv, kv), strict=True)
        ],
        output=files.named(_LAYER, "self_attn.o_proj.weight", (hidden, width)),
        gate=files.named(_LAYER, "mlp.gate_proj.weight", (inner, hidden)),
        up=files.named(_LAYER, "mlp.up_proj.weight", (inner, hidden)),
        down=files.named(_LAYER, "mlp.down_proj.weight", (hidden, inner)),
        lm_head=files.named(_PLAIN, "lm_head.weight", (drafts, hidden)),
        draft_tokens=_draft_tokens(files, drafts, model.vocab_size),
        layers=layers,
        norm_before_residual=config.get("norm_before_residual") is True,
    )
    return shape, weights


def _tapped(path: Path, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the tapped layers: the config's, else those of the authors, early, middle and late."""
    inner = config.get("eagle_config")
    named = config.get("eagle_aux_hidden_state_layer_ids") or (
        inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, dict) else None
    )
    found = tuple(named) if isinstance(named, list) else (2, layers // 2, layers - 3)
    if not found or not all(isinstance(layer, int) and 0 <= layer < layers for layer in found):
        raise BadHeads(f"{path}: it reads layers {found}, the model has {layers}")
    return found


def _projection(
    files: HeadTensors, name: str, size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return matrix and bias of the queries (`q`), keys or values."""
    bias = files.find(_LAYER, f"self_attn.{name}_proj.bias")
    matrix = files.named(_LAYER, f"self_attn.{name}_proj.weight", size)
    return matrix, None if bias is None else files.sized(bias, size[:1])


def _draft_tokens(files: HeadTensors, drafts: int, vocab: int) -> torch.Tensor:
    """Return the model's number of each drafted token; without `d2t` they are the same."""
    found = files.find(_PLAIN, "d2t")
    numbers = torch.arange(drafts)
    if found is not None:
        steps = files.raw(found)
        if steps.shape != numbers.shape:
            raise BadHeads(f"{files.path}: d2t has {len(steps)} numbers for {drafts} tokens")
        numbers = numbers + steps.long()
    if int(numbers.min()) < 0 or int(numbers.max()) >= vocab:
        raise BadHeads(f"{files.path}: it drafts tokens that the model's vocabulary of {vocab} lacks")
    return numbers
