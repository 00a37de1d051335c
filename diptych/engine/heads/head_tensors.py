"""Tensors of a head's folder, and the checks that they are a model's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from diptych.engine.heads.head_files import BadHeads


class HeadTensors:
    """The tensors of a folder's safetensors files."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Read all of `path`, to be given in `dtype`. Raises BadHeads."""
        self.path = path
        self._dtype = dtype
        self._tensors: dict[str, torch.Tensor] = {}
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise BadHeads(f"{path} has no safetensors files: other forms are pickles, which are never read")
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    self._tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise BadHeads(f"{file} is broken or incomplete, no safetensors file") from error

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def find(self, prefixes: Sequence[str], name: str) -> str | None:
        """Return the full name of a tensor, if there is one."""
        return next((prefix + name for prefix in prefixes if prefix + name in self._tensors), None)

    def raw(self, name: str) -> torch.Tensor:
        """Return a tensor that is there, as it is stored."""
        return self._tensors[name]

    def named(self, prefixes: Sequence[str], name: str, size: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of a name behind one of `prefixes`. Raises BadHeads for none or another size."""
        found = self.find(prefixes, name)
        if found is None:
            raise BadHeads(f"{self.path} lacks {name}")
        return self.sized(found, size)

    def optional(self, prefixes: Sequence[str], name: str, size: tuple[int, ...]) -> torch.Tensor | None:
        """Return what `named` does, None where there is no such tensor. Raises BadHeads for another size."""
        found = self.find(prefixes, name)
        return None if found is None else self.sized(found, size)

    def sized(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor that is there. Raises BadHeads for another size, or numbers that are not finite."""
        tensor = self._tensors[name]
        if tuple(tensor.shape) != size:
            said, wanted = (" x ".join(map(str, one)) for one in (tensor.shape, size))
            raise BadHeads(
                f"{self.path}: {name} is of {said}, for this model it would be {wanted}: this is "
                "the head of another model"
            )
        if not tensor.isfinite().all():
            raise BadHeads(f"{self.path}: {name} has numbers that are not finite")
        return tensor.to(self._dtype).contiguous()
