"""Embeddings of images that were encoded, by digest, within a bound of memory: the least recently used go
first.

A digest is keyed by tenant, salt and model (diptych/runtime/image_rows.py): no caller finds what another
one's image left.
"""

from __future__ import annotations

from collections import OrderedDict

import torch


class EmbeddingCache:
    """A bounded cache of embeddings `[rows, hidden]`; not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Keep at most `max_bytes`; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._found: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        return self._bytes

    def clear(self) -> int:
        """Forget all; return how many images were kept."""
        count = len(self._found)
        self._found.clear()
        self._bytes = 0
        return count

    def get(self, digest: bytes) -> torch.Tensor | None:
        """Return an image's embeddings, which were used now."""
        if digest in self._found:
            self._found.move_to_end(digest)
        return self._found.get(digest)

    def put(self, digest: bytes, rows: torch.Tensor) -> None:
        """Keep an image's embeddings, unless they alone exceed the bound."""
        if digest in self._found or rows.nbytes > self._max_bytes:
            return
        self._found[digest] = rows
        self._bytes += rows.nbytes
        while self._bytes > self._max_bytes:
            _, gone = self._found.popitem(last=False)
            self._bytes -= gone.nbytes
