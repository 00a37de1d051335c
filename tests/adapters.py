"""Random LoRA adapters as PEFT folders, and what transformers computes of a model with one merged."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from diptych.engine.adapters.adapter import Adapter, Delta, adaptable_fields
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.canonical import layer_shapes

_TEXT_MODULES = r".*(language_model|text_model)\.layers\.\d+\.(mlp|self_attn)\.\w+_proj"
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules_of(model: Any, targets: Sequence[str], layers: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the linear modules of a transformers model whose names end with one of `targets`."""
    found = {}
    for name, module in model.named_modules():
        number = re.search(r"\.layers\.(\d+)\.", name)
        if layers is not None and (number is None or int(number[1]) not in layers):
            continue
        if isinstance(module, torch.nn.Linear) and name.endswith(tuple(f".{one}" for one in targets)):
            found[name] = module
    return found


def write_adapter(
    folder: Path,
    model: Any,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ALL,
    layers: Sequence[int] | None = None,
    ranks: Mapping[str, int] | None = None,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter with random A and B for the modules of `model` that `targets` names; return `folder`.

    `ranks` has those of module names that differ; `config` goes into adapter_config.json. At a `strength` of
    1 a change is about half as large as what the matrix gives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in modules_of(model, targets, layers).items():
        own = next((value for end, value in (ranks or {}).items() if name.endswith(end)), rank)
        out, inner = module.weight.shape
        scale = module.weight.float().std().item() * strength / (alpha / own) / own**0.5 / 2
        a = torch.randn(own, inner, generator=random)
        b = torch.randn(out, own, generator=random) * scale
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "layers_to_transform": None if layers is None else list(layers),
        "rank_pattern": dict(ranks or {}),
        "bias": "none",
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


@dataclass(frozen=True)
class _Text:
    """The text part of a transformers model, under its own names."""

    model: Any

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        return ((name, one) for name, one in self.model.named_modules() if re.fullmatch(_TEXT_MODULES, name))


def write_text_adapter(folder: Path, model: Any, *, seed: int) -> Path:
    """Write an adapter as `write_adapter` does, of the text part of a `model` with images alone."""
    return write_adapter(folder, _Text(model), seed=seed, target_modules=_TEXT_MODULES)


def merged(model: Any, *folders: Path) -> Any:
    """Return a copy of a transformers model with `W + s B A` in place of each adapted W."""
    made = copy.deepcopy(model)
    modules = dict(made.named_modules())
    with torch.no_grad():
        for folder in folders:
            config = json.loads((folder / "adapter_config.json").read_text())
            tensors = load_file(folder / "adapter_model.safetensors")
            for name, a in tensors.items():
                if ".lora_A." not in name:
                    continue
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[name.replace(".lora_A.", ".lora_B.")].float()
                alpha = next(
                    (
                        value
                        for key, value in config.get("alpha_pattern", {}).items()
                        if re.fullmatch(rf"(.*\.)?({key})", module)
                    ),
                    config["lora_alpha"],
                )
                rank = a.shape[0]
                scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
                weight = modules[module].weight
                weight += (scale * (b.double() @ a.double())).to(weight.dtype)
    return made


def random_adapter(shape: ModelShape, seed: int, rank: int = 4) -> Adapter:
    """Return an adapter with random changes of all matrices of a shape that can have one."""
    random = torch.Generator().manual_seed(seed)

    def delta(rows: int, columns: int) -> Delta:
        a, b = torch.randn(rank, columns, generator=random), torch.randn(rows, rank, generator=random)
        return Delta(a / columns**0.5, b / rank**0.5, 0.5)

    def changes(layer: int) -> dict[str, Delta]:
        sizes = dict(layer_shapes(shape, layer))
        fields = (field for field in adaptable_fields(shape, layer) if field in sizes)
        return {field: delta(*sizes[field]) for field in fields}

    return Adapter(tuple(changes(layer) for layer in range(shape.num_layers)))
