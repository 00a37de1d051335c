"""Layers for multi-token prediction, which DeepSeek-V3, GLM-4.5 and others have behind their own.

They lie in the model's folder as layer number `num_hidden_layers`: all tensors of a layer, and `enorm`,
`hnorm` and `eh_proj` before it, `shared_head.norm` behind it; `embed_tokens` and `shared_head.head` are the
model's once more, and are read where they are there. Of several such layers the first one drafts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from diptych.engine.dtype import plain_precision
from diptych.engine.heads.head_files import BadHeads
from diptych.engine.heads.layer_head import HeadInputs, LayerHead
from diptych.engine.models.registry import family_of
from diptych.engine.models.shape import BadModelFile, ModelShape, UnsupportedModel
from diptych.engine.weights.canonical import Matrix, assemble
from diptych.engine.weights.hf_config import read_config
from diptych.engine.weights.reader import OpenCheckpoint
from diptych.engine.weights.safetensors_folder import open_folder
from diptych.engine.weights.tensor_files import TensorFiles

BY_NAME: Final = "mtp"
"""Value of `--speculative-model` for the model's own such layer."""


def count_layers(path: Path) -> int:
    """Return how many such layers a model's config names. Raises BadHeads where it can have none."""
    if not path.is_dir():
        raise BadHeads(f"{path}: multi-token prediction layers are read from folders with safetensors")
    try:
        config = read_config(path)
        field = family_of(config["model_type"]).layers_behind
    except (UnsupportedModel, FileNotFoundError) as error:
        raise BadHeads(f"{path}: {error}") from error
    count = 0 if field is None else config.get(field) or 0
    if not isinstance(count, int) or count < 1:
        named = "num_nextn_predict_layers" if field is None else field
        raise BadHeads(f"{path}: the model has no multi-token prediction layers ({named} in its config.json)")
    return count


def check_mtp(path: Path, model: ModelShape) -> str:
    """Return in words what the layers of a model of shape `model` are, by the files' headers. Raises
    BadHeads.
    """
    count, size = count_layers(path), (model.hidden_size, 2 * model.hidden_size)
    name = f"model.layers.{model.num_layers}.eh_proj.weight"
    try:
        found = TensorFiles(path).size(name)
    except BadModelFile as error:
        raise BadHeads(f"{path}: {error}") from error
    if found != size:
        raise BadHeads(f"{path}: tensor {name} is {found}, not {size}")
    return f"{count} multi-token prediction layer{'s' * (count > 1)}, of which the first one drafts"


def read_mtp(path: Path, model: ModelShape, embed: torch.Tensor | None, dtype: torch.dtype) -> LayerHead:
    """Read the layer of the model at `path`, of shape `model`, in `dtype`, with `embed`, if that is given.

    Raises BadHeads.
    """
    count_layers(path)
    try:
        opened = open_folder(path, plain_precision(dtype), behind_too=True)
        files = TensorFiles(path)
        return _Reader(path, model, opened, files, dtype).head(embed)
    except (UnsupportedModel, BadModelFile, FileNotFoundError) as error:
        raise BadHeads(f"{path}: {error}") from error


class _Reader:
    """Reads the first layer behind a model's own."""

    def __init__(
        self, path: Path, model: ModelShape, opened: OpenCheckpoint, files: TensorFiles, dtype: torch.dtype
    ) -> None:
        self._path, self._model = path, model
        self._opened, self._files, self._dtype = opened, files, dtype
        self._prefix = f"model.layers.{model.num_layers}."

    def head(self, embed: torch.Tensor | None) -> LayerHead:
        model = self._model
        hidden, layer = model.hidden_size, self._opened.shape.layers[model.num_layers]
        shape = replace(model, layers=(layer,), tied_embeddings=False)
        inputs = HeadInputs(
            self._own("eh_proj.weight", (hidden, 2 * hidden)),
            token_norm=self._own("enorm.weight", (hidden,)),
            feature_norm=self._own("hnorm.weight", (hidden,)),
        )
        weights = assemble(shape, self._read, own_head=True, has_embed=embed is None)
        if embed is not None:
            weights = replace(weights, embed=embed.to(self._dtype))
        return LayerHead(shape, weights, inputs, (model.num_layers,), normed=True)

    def _read(self, name: str) -> Matrix:
        """Read a canonical tensor of the model of one layer that the head is."""
        model, matrix = self._model, (self._model.vocab_size, self._model.hidden_size)
        if name.startswith("layers."):
            return self._opened.read(f"layers.{model.num_layers}.{name.split('.', 2)[2]}")
        if name == "final_norm":
            return self._own("shared_head.norm.weight", (model.hidden_size,))
        stored = {"embed": "embed_tokens.weight", "head": "shared_head.head.weight"}[name]
        if self._files.has(self._prefix + stored):
            return self._own(stored, matrix)
        return self._opened.read(name)

    def _own(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor of full numbers that only such a layer has."""
        tensor = self._files.read(self._prefix + name)
        if tuple(tensor.shape) != size:
            raise BadModelFile(f"tensor {self._prefix}{name} is {tuple(tensor.shape)}, not {size}")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise UnsupportedModel(f"tensor {self._prefix}{name} is quantised: it is read of full numbers")
        if not tensor.isfinite().all():
            raise BadModelFile(f"tensor {self._prefix}{name} has numbers that are not finite")
        return tensor.to(self._dtype).contiguous()
