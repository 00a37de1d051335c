"""The interface of image encoders, and what they share: normalisation, and a folder's tensors by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.image_spec import ImageSpec


class EncoderFiles(Protocol):
    """Tensors of a model's files by the names that folders have."""

    def names(self) -> list[str]: ...
    def read(self, name: str) -> torch.Tensor:
        """Return a tensor. Raises BadModelFile."""
        ...

    def stored_name(self, name: str) -> str:
        """Return what the files call a tensor."""
        ...


class ImageEncoder(Protocol):
    """Encodes the tiles of images, one at a time: a tile's rows have the same bits whatever is beside it."""

    @property
    def spec(self) -> ImageSpec:
        """Images as the model wants them: which tiles it takes, and how many rows each gives."""
        ...

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[rows, hidden]` of a tile, uint8 `[channels, height, width]`."""
        ...


class Normaliser:
    """Turns uint8 pixels into the numbers that an encoder reads, bit for bit those of transformers'
    processors.

    A channel has 256 values, so that a table holds them all.
    """

    def __init__(self, spec: ImageSpec, dtype: torch.dtype, device: torch.device) -> None:
        scaled = (np.arange(256, dtype=np.float64) * spec.factor).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (spec.mean, spec.std))
        self._table = torch.from_numpy((scaled[None] - mean) / std).to(device, dtype)

    def __call__(self, tile: torch.Tensor) -> torch.Tensor:
        """Return the numbers `[channels, height, width]` of a uint8 tile."""
        planes = tile.to(self._table.device).int()
        return torch.stack([table[plane] for table, plane in zip(self._table, planes, strict=True)])


class EncoderTensors:
    """The tensors of an encoder in a folder. What is never taken is refused at the end, by its name."""

    def __init__(
        self, files: EncoderFiles, prefixes: Sequence[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Read names below the first of `prefixes` that a tensor has: files of several ages spell them
        otherwise.
        """
        names = files.names()
        self._prefix = next((one for one in prefixes if any(n.startswith(one) for n in names)), prefixes[0])
        self._files, self._dtype, self._device = files, dtype, device
        self._left = {name for name in names if name.startswith(self._prefix)}

    def take(self, name: str, *size: int) -> torch.Tensor:
        """Return a tensor of this size. Raises UnsupportedModel, naming it, for another one; BadModelFile."""
        full = self._prefix + name
        tensor = self._files.read(full)
        self._left.discard(full)
        if tuple(tensor.shape) != size:
            stored = self._files.stored_name(full)
            raise UnsupportedModel(f"tensor {stored} is {tuple(tensor.shape)}, the config says {size}")
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"tensor {full}: quantised image encoders are not computed")
        return tensor.to(self._device, self._dtype)

    def pair(self, name: str, *size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight of `size` and bias of a layer."""
        return self.take(f"{name}.weight", *size), self.take(f"{name}.bias", size[0])

    def refuse_others(self, ignored: Iterable[str] = ()) -> None:
        """Raise UnsupportedModel for a tensor that was not taken and whose name has none of the patterns."""
        patterns = [re.compile(one) for one in ignored]
        for name in sorted(self._left):
            if not any(pattern.search(name) for pattern in patterns):
                raise UnsupportedModel(f"tensor {name} is not computed: the image encoder has no such tensor")


@dataclass(frozen=True)
class EncoderSource:
    """Files that an encoder is read from, and what it is to compute in."""

    config: Mapping[str, Any]
    """The model's config.json."""
    spec: ImageSpec
    files: EncoderFiles
    text_hidden: int
    """Width of the text model, which gets the rows."""
    dtype: torch.dtype
    device: torch.device

    def normaliser(self) -> Normaliser:
        """Return what turns tiles into the encoder's numbers."""
        return Normaliser(self.spec, self.dtype, self.device)

    def tensors(self, *prefixes: str) -> EncoderTensors:
        """Return the tensors below the first of `prefixes` that the files have."""
        return EncoderTensors(self.files, prefixes, self.dtype, self.device)
