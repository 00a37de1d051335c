"""Adapters from a PEFT folder: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from diptych.engine.adapters.adapter import Adapter, BadAdapter, Delta
from diptych.engine.adapters.modules import Module, adaptable_modules, other_modules
from diptych.engine.adapters.peft_config import PeftConfig, parse_peft_config
from diptych.engine.models.registry import folder_family_of
from diptych.engine.models.shape import ModelShape, UnsupportedModel

_PREFIX = "base_model.model."
_LAYERS = "model.layers."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<letter>[AB])(\.default)?\.weight")
_TEXT_LAYERS = ("language_model.model.layers.", "model.language_model.layers.", "model.text_model.layers.")
"""Beginnings of the names of layers in a model with images around a text model."""
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector)\.")
"""Beginnings of the names of modules that encode images, or map them to the text model."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_peft_folder(folder: Path, shape: ModelShape, max_rank: int) -> Adapter:
    """Read the adapter of a folder for a model of `shape`, whatever files the model came from.

    Raises BadAdapter, naming the field, tensor or module, and OSError.
    """
    config = parse_peft_config(_fields(folder / "adapter_config.json"))
    try:
        family = folder_family_of(shape.family)
    except UnsupportedModel:
        raise BadAdapter(f"adapters of Hugging Face folders are not read for a {shape.family}") from None
    tensors = _tensors(folder / "adapter_model.safetensors")
    _check_encoder(tensors)
    prefix = _layer_prefix(tensors)
    known = adaptable_modules(shape, family.layer, prefix)
    others = other_modules(shape, family.layer, family.model, prefix)
    _check_targets(config, known, others)
    pairs = _pairs(tensors, known, others)
    _check_present(config, known, pairs)
    layers: list[dict[str, Delta]] = [{} for _ in range(shape.num_layers)]
    for name, (a, b) in pairs.items():
        module = known[name]
        _check_rank(config, name, a, max_rank)
        scale = config.scale_of(name)
        deltas = module.deltas(a, b, scale, shape, interleaved=family.interleaved)
        layers[module.layer].update(deltas)
    return Adapter(tuple(layers))


def _fields(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadAdapter(f"{path.name}: {error}") from None
    if not isinstance(fields, dict):
        raise BadAdapter(f"{path.name} is no object")
    return fields


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by name, below peft's own prefix, as copies: the file may change."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {
                name.removeprefix(_PREFIX): _numbers(name, file.get_tensor(name))
                for name in file.keys()  # noqa: SIM118 -- no dictionary
            }
    except (SafetensorError, ValueError) as error:
        raise error if isinstance(error, BadAdapter) else BadAdapter(f"{path.name}: {error}") from None
    if not tensors:
        raise BadAdapter(f"{path.name} has no tensors")
    return tensors


def _numbers(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, in float32 unless it is bfloat16."""
    if tensor.dtype not in _FLOATS:
        raise BadAdapter(f"tensor {name} is of type {tensor.dtype}")
    kept = tensor.clone() if tensor.dtype == torch.bfloat16 else tensor.to(torch.float32, copy=True)
    if not bool(torch.isfinite(kept).all()):
        raise BadAdapter(f"tensor {name} has numbers that are not finite")
    return kept.contiguous()


def _check_encoder(tensors: Iterable[str]) -> None:
    """Raise BadAdapter for a tensor of what encodes images: their rows are the same for all adapters."""
    for name in tensors:
        if _OF_IMAGES.match(name) is not None:
            raise BadAdapter(
                f"tensor {name}: adapters of what encodes images are not computed; exclude_modules leaves it "
                "out in training"
            )


def _layer_prefix(tensors: Iterable[str]) -> str:
    """Return the beginning of the names of layers, which is longer around a text model with images."""
    for name in tensors:
        for prefix in _TEXT_LAYERS:
            if name.startswith(prefix):
                return prefix
    return _LAYERS


def _pairs(
    tensors: dict[str, torch.Tensor], known: dict[str, Module], others: Collection[str]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B of each module. Raises BadAdapter for any other tensor."""
    letters: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match["module"] not in known:
            raise BadAdapter(f"tensor {name}: {_why_not(name, others)}")
        letters.setdefault(match["module"], {})[match["letter"]] = tensor
    for module, found in letters.items():
        for letter in "AB":
            if letter not in found:
                raise BadAdapter(f"tensor {module}.lora_{letter}.weight is missing")
            if found[letter].ndim != 2:
                raise BadAdapter(f"tensor {module}.lora_{letter}.weight is no matrix")
    return {module: (found["A"], found["B"]) for module, found in letters.items()}


def _why_not(name: str, others: Collection[str]) -> str:
    """Return why a tensor is not computed; `others` are the modules of the model that cannot be adapted."""
    if "expert" in name:
        return "adapters of experts are not computed"
    if "lora_magnitude_vector" in name:
        return "DoRA is not computed"
    if "lora_embedding" in name or "embed_tokens" in name:
        return "adapters of embeddings are not computed"
    if name.startswith("lm_head"):
        return "adapters of the output matrix are not computed"
    match = _TENSOR.fullmatch(name)
    if match is None:
        return "it is neither A nor B of an adapter"
    if match["module"] in others:
        conv = "conv" in match["module"].rpartition(".")[2]
        return "adapters of convolutions are not computed" if conv else "its module cannot be adapted here"
    return "the model has no such module that can be adapted"


def _check_targets(config: PeftConfig, known: Iterable[str], others: list[str]) -> None:
    """Raise BadAdapter for an entry of target_modules that matches no module that can be adapted."""
    if isinstance(config.targets, str):
        if not any(config.adapts(module) for module in known):
            raise BadAdapter(f"target_modules: {config.targets!r} matches no module that can be adapted")
        return
    for entry in config.targets:
        if any(module == entry or module.endswith(f".{entry}") for module in known):
            continue
        there = any(module == entry or module.endswith(f".{entry}") for module in others)
        why = "cannot be adapted here" if there else "matches no module of this model"
        raise BadAdapter(f"target_modules: {entry!r} {why}")


def _check_present(config: PeftConfig, known: Iterable[str], present: Iterable[str]) -> None:
    """Raise BadAdapter where the tensors are not those of the modules that the configuration names."""
    there = set(present)
    for module in known:
        if config.adapts(module) and module not in there:
            raise BadAdapter(f"tensor {module}.lora_A.weight is missing: target_modules names its module")
        if module in there and not config.adapts(module):
            raise BadAdapter(f"tensor {module}.lora_A.weight: target_modules does not name its module")


def _check_rank(config: PeftConfig, module: str, a: torch.Tensor, max_rank: int) -> None:
    rank = config.rank_of(module)
    if a.shape[0] != rank:
        raise BadAdapter(f"{module}: A has {a.shape[0]} rows, its rank is {rank}")
    if rank > max_rank:
        raise BadAdapter(f"{module}: rank {rank}, and --max-lora-rank is {max_rank}")
