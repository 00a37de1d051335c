"""Adapters from a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes them.

`general.type` is "adapter" and `adapter.type` "lora"; a module's A and B are `<tensor>.lora_a` and
`<tensor>.lora_b`, by the names and with the rows of the base's tensors in GGUF files. The scale is
`adapter.lora.alpha` / rank, and 1 where alpha is 0.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from diptych.engine.adapters.adapter import Adapter, BadAdapter, Delta
from diptych.engine.adapters.modules import adaptable_modules
from diptych.engine.models.registry import gguf_family_of
from diptych.engine.models.shape import BadModelFile, ModelShape, UnsupportedModel
from diptych.engine.weights.gguf_file import dequantised
from diptych.engine.weights.gguf_header import GgufHeader, GgufTensor, read_header

_LAYERS = "blk."
_TENSOR = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<letter>[ab])")


def read_gguf_adapter(path: Path, shape: ModelShape, max_rank: int) -> Adapter:
    """Read the adapter of a GGUF file for a model of `shape`, whatever files the model came from.

    Raises BadAdapter, naming the key or tensor, and OSError.
    """
    try:
        header = read_header(path)
        family = gguf_family_of(_architecture(header))
        pairs = _pairs(header)
    except (BadModelFile, UnsupportedModel) as error:
        raise BadAdapter(str(error)) from None
    alpha = header.metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, str | bool):
        raise BadAdapter("adapter.lora.alpha: is no number")
    known = adaptable_modules(shape, family.layer, _LAYERS)
    layers: list[dict[str, Delta]] = [{} for _ in range(shape.num_layers)]
    for name, (a, b) in pairs.items():
        module, rank = known.get(name), int(a.shape[0])
        if module is None:
            raise BadAdapter(f"tensor {name}.weight.lora_a: the model has no such matrix that can be adapted")
        if rank > max_rank:
            raise BadAdapter(f"{name}: rank {rank}, and --max-lora-rank is {max_rank}")
        scale = float(alpha) / rank if alpha else 1.0
        layers[module.layer].update(module.deltas(a, b, scale, shape, interleaved=family.interleaved))
    return Adapter(tuple(layers))


def _architecture(header: GgufHeader) -> str:
    """Return the architecture of the base. Raises BadAdapter for a file that is no LoRA adapter."""
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if header.metadata.get(key) != expected:
            raise BadAdapter(f"{key}: is {header.metadata.get(key)!r}, and not {expected!r}")
    for key in (*header.metadata, *header.arrays):
        if key.startswith("adapter.alora"):
            raise BadAdapter(f"{key}: adapters that begin within a prompt are not computed")
    return str(header.metadata.get("general.architecture"))


def _pairs(header: GgufHeader) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B of each module."""
    letters: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in header.tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise BadAdapter(f"tensor {name}: it is neither A nor B of an adapter's matrix")
        letters.setdefault(match["module"], {})[match["letter"]] = _numbers(tensor)
    if not letters:
        raise BadAdapter("has no tensors")
    for module, found in letters.items():
        if len(found) != 2:
            raise BadAdapter(f"{module}.weight: it has A or B alone")
    return {module: (found["a"], found["b"]) for module, found in letters.items()}


def _numbers(tensor: GgufTensor) -> torch.Tensor:
    if len(tensor.shape) != 2:
        raise BadAdapter(f"tensor {tensor.name} is no matrix")
    numbers = dequantised(tensor).clone()  # the file may change
    if not bool(torch.isfinite(numbers).all()):
        raise BadAdapter(f"tensor {tensor.name} has numbers that are not finite")
    return numbers
