"""The tensors of a Hugging Face folder by name, whole or in part."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised.region import Axis, Region

_TEXT_PREFIXES = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
    **{own: own for own in ("model.layers.", "model.embed_tokens.", "model.norm.")},
}
"""Beginnings of the names of a wrapper's text model, and what they are in the text model by itself."""
_BACKBONE = "backbone."
"""Beginning of the names in models whose files call so what others call the model (Nemotron-H)."""


class TensorFiles:
    """The tensors of a folder by name, each read when asked for."""

    def __init__(self, folder: Path, *, wrapped: bool = False) -> None:
        """Open the files; of a model that is `wrapped`, the text model's tensors, by its own names."""
        self.paths = tuple(weight_files(folder))
        self._files: dict[str, tuple[Any, str]] = {}
        for path in self.paths:
            try:
                handle: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise BadModelFile(f"{path.name}: {error}") from error
            for stored in handle.keys():  # noqa: SIM118 -- safetensors' handle is no dictionary
                if (name := _name_of_text(stored) if wrapped else _own_name(stored)) is not None:
                    self._files[name] = handle, stored

    def dtypes(self) -> dict[str, str]:
        """Return the type of each tensor, as safetensors names it, from the headers alone."""
        return {name: handle.get_slice(of).get_dtype() for name, (handle, of) in self._files.items()}

    def names(self) -> list[str]:
        """Return the names of all tensors, in order."""
        return sorted(self._files)

    def has(self, name: str) -> bool:
        return name in self._files

    def size(self, name: str) -> tuple[int, ...]:
        """Return the size of a tensor, from the header alone. Raises BadModelFile."""
        handle, stored = self._found(name)
        return tuple(handle.get_slice(stored).get_shape())

    def read_slice(
        self,
        name: str,
        rows: slice,
        columns: slice,
        expert: int | None = None,
        *,
        viewed: tuple[int, int] | None = None,
        as_bytes: bool = False,
    ) -> torch.Tensor:
        """Return these rows, and columns of them where there are such; no other bytes are read.

        With `expert` they are those of its part of a tensor of all experts. With `viewed` the tensor is flat,
        and seen in that size; with `as_bytes` these are sizes of its bytes. Raises BadModelFile.
        """
        handle, stored = self._found(name)
        if viewed is not None:
            flat: torch.Tensor = handle.get_tensor(stored).flatten()  # of the mapped file: nothing is read
            flat = flat.view(torch.uint8) if as_bytes else flat
            if len(flat) < math.prod(viewed):
                raise BadModelFile(f"tensor {name} does not hold {viewed[0]} times {viewed[1]} entries")
            return flat[: math.prod(viewed)].view(viewed)[rows, columns]
        part = handle.get_slice(stored)
        size = part.get_shape()
        if expert is None:
            found: torch.Tensor = part[rows] if len(size) == 1 else part[rows, columns]
            return found
        _check_expert(name, size, expert)
        one = slice(expert, expert + 1)
        of_one: torch.Tensor = part[one, rows] if len(size) == 2 else part[one, rows, columns]
        return of_one[0]

    def _found(self, name: str) -> tuple[Any, str]:
        if name not in self._files:
            raise BadModelFile(f"tensor {name} is missing")
        return self._files[name]

    def read(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Return a tensor, or `expert`'s part of one of all experts. Raises BadModelFile."""
        handle, stored = self._found(name)
        if expert is None:
            tensor: torch.Tensor = handle.get_tensor(stored)
            return tensor
        part = handle.get_slice(stored)
        _check_expert(name, part.get_shape(), expert)
        one: torch.Tensor = part[expert : expert + 1]
        return one[0]


def _own_name(stored: str) -> str:
    return f"model.{stored.removeprefix(_BACKBONE)}" if stored.startswith(_BACKBONE) else stored


def _check_expert(name: str, size: Sequence[int], expert: int) -> None:
    if expert >= size[0]:
        raise BadModelFile(f"tensor {name} has {size[0]} experts")


@dataclass(frozen=True)
class MatrixTensors:
    """Tensors of one quantised matrix of a folder; implements `Tensors` (quantised/scheme.py)."""

    tensors: TensorFiles
    expert: int | None = None
    """Number of the expert whose part of tensors of all experts is read."""
    region: Region | None = None

    def has(self, name: str) -> bool:
        return self.tensors.has(name)

    def size(self, name: str) -> tuple[int, ...]:
        """See `Tensors.size`."""
        size = self.tensors.size(name)
        return size if self.expert is None else size[1:]

    def read(
        self, name: str, *axes: Axis | None, viewed: tuple[int, int] | None = None, as_bytes: bool = False
    ) -> torch.Tensor:
        """See `Tensors.read`."""
        if viewed is None and (self.region is None or all(axis is None for axis in axes)):
            return self.tensors.read(name, self.expert)
        entries = [slice(None) if self.region is None else self.region.entries(axis) for axis in axes]
        rows, columns = (*entries, slice(None))[:2]
        return self.tensors.read_slice(name, rows, columns, self.expert, viewed=viewed, as_bytes=as_bytes)


def _name_of_text(stored: str) -> str | None:
    """Return the name that a wrapper's tensor has in its text model, None if it is not part of that."""
    for prefix, own in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return None


def weight_files(folder: Path) -> list[Path]:
    """Return the files with weights; one file precedes an index, which an earlier model may have left."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    names = set(json_object(index).get("weight_map", {}).values())
    for name in names:
        # A name with a separator could reach outside of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise BadModelFile("the weight index names a file outside of its folder")
    return [folder / name for name in sorted(names)]


def json_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadModelFile(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path.name} is not an object")
    return value
