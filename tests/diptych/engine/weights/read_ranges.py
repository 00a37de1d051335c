"""Record of the bytes of a folder's tensors that were given out: by where they lie in the files."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.weights.tensor_files import TensorFiles


class ReadRanges:
    """Marks every byte of every tensor that `TensorFiles` gave out; tensors are views of the mapped files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch all files until the test ends."""
        self._marks: dict[str, torch.Tensor] = {}
        read, read_slice = TensorFiles.read, TensorFiles.read_slice

        def marked(files: TensorFiles, name: str, expert: int | None = None) -> torch.Tensor:
            return self._mark(name, read(files, name, expert))

        def marked_slice(files: TensorFiles, name: str, *of: object, **more: object) -> torch.Tensor:
            return self._mark(name, read_slice(files, name, *of, **more))  # type: ignore[arg-type]

        monkeypatch.setattr(TensorFiles, "read", marked)
        monkeypatch.setattr(TensorFiles, "read_slice", marked_slice)

    def take(self) -> int:
        """Return how many bytes were given out since the last call, each counted once."""
        count = sum(int(marks.sum()) for marks in self._marks.values())
        self._marks = {}
        return count

    def _mark(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        size, begin = tensor.itemsize, tensor.storage_offset() * tensor.itemsize
        # Views of other sizes and types of one tensor have its storage, too.
        marks = self._marks.setdefault(name, torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.bool))
        places = (*tensor.shape, size), (*(step * size for step in tensor.stride()), 1)
        marks.as_strided(*places, begin).fill_(True)
        return tensor
