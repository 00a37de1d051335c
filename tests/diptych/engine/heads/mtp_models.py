"""Tiny models with a layer for multi-token prediction, as transformers computes them and their files are."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from tests.diptych.engine.models.expert_models import CONFIGS, random_oracle

FAMILIES = ("deepseek_v3", "glm4_moe")


def write(folder: Path, name: str, seed: int = 12, **sizes: int) -> tuple[Any, MtpLayer]:
    """Write a model whose last layer drafts; return transformers' model without it, and that layer.

    `sizes` are fields of the config with other values.
    """
    config = deepcopy(CONFIGS[name])
    config.update(sizes)
    config.num_hidden_layers += 1
    config.tie_word_embeddings = False
    oracle = random_oracle(config, seed)
    oracle.save_pretrained(folder)
    behind = config.num_hidden_layers - 1
    own = MtpLayer(config, lambda *_: oracle.model.layers[behind], type(oracle.model.norm), behind)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in own.named_parameters():
            if not key.startswith("mtp_block"):
                tensor.normal_(1.0 if "norm" in key else 0.0, 0.3, generator=generator)
    oracle.model.layers = oracle.model.layers[:behind]
    _add(folder, own, oracle, behind)
    return oracle, own


def _add(folder: Path, own: MtpLayer, oracle: Any, behind: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    at = f"model.layers.{behind}."
    for name in ("enorm", "hnorm", "eh_proj"):
        tensors[f"{at}{name}.weight"] = getattr(own, name).weight.detach().clone()
    tensors[f"{at}shared_head.norm.weight"] = own.post_norm.weight.detach().clone()
    tensors[f"{at}shared_head.head.weight"] = oracle.lm_head.weight.detach().clone()
    tensors[f"{at}embed_tokens.weight"] = oracle.model.embed_tokens.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": behind, "num_nextn_predict_layers": 1}
    for field in ("num_mtp_layers", "layer_types", "mlp_layer_types"):
        config.pop(field, None)
    (folder / "config.json").write_text(json.dumps(config))


def features(oracle: Any, ids: list[int]) -> torch.Tensor:
    """Return transformers' rows behind the final norm: `[tokens, hidden]`."""
    with torch.no_grad():
        found: torch.Tensor = oracle.model(torch.tensor([ids])).last_hidden_state[0]
    return found


def through(oracle: Any, own: MtpLayer, ids: list[int], before: torch.Tensor) -> torch.Tensor:
    """Return what transformers' layer gives for tokens, each with the feature of the one before it."""
    with torch.no_grad():
        embedded = oracle.model.embed_tokens(torch.tensor([ids]))
        positions = torch.arange(len(ids))[None]
        mask = torch.full((1, 1, len(ids), len(ids)), -torch.inf).triu(1)
        angles = oracle.model.rotary_emb(embedded, positions)
        found: torch.Tensor = own(embedded, before[None], angles, mask, positions, None)[0]
    return found
