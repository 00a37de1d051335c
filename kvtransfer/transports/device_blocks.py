"""Copies of blocks on a GPU with their digests, in one launch for all layers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from engine.kv_memory import KVMemory
from kvtransfer.messages import GrantRef

DIGEST_WORDS = 2


class DigestedCopy:
    """Blocks of one memory to places of another, with digests bound to (slot, generation, index).

    The kernel's digest is another one than the host's xxh3: both ends of a pair have the same kind of memory.
    """

    def __init__(
        self,
        source: KVMemory,
        source_ids: Sequence[int],
        target: KVMemory,
        target_ids: Sequence[int],
        ref: GrantRef,
        first: int,
    ) -> None:
        self._source, self._target = source, target
        self._source_ids, self._target_ids = source_ids, target_ids
        self._ref, self._first = ref, first
        self._digests: torch.Tensor | None = None
        self._ids: tuple[torch.Tensor, torch.Tensor] | None = None

    def launch(self) -> None:
        """Queue the copy on the current stream of the current device."""
        # Needs Triton, which CPU installs may not have.
        copy_blocks = importlib.import_module("kernels.gpu.copy_blocks").copy_blocks
        device = torch.device("cuda", torch.cuda.current_device())
        self._ids = (_ids(self._source_ids, device), _ids(self._target_ids, device))
        self._digests = torch.zeros((len(self._source_ids), DIGEST_WORDS), dtype=torch.int64, device=device)
        binding = (self._ref.slot, self._ref.generation, self._first)
        source_ids, target_ids = self._ids
        copy_blocks(
            self._source.data,
            source_ids,
            self._target.data,
            target_ids,
            digests=self._digests,
            binding=binding,
        )

    def digests(self) -> list[bytes]:
        """Of each block, 16 bytes. Call it when the copy is done."""
        if self._digests is None:
            raise RuntimeError("the copy was not launched")
        return [bytes(row.numpy().tobytes()) for row in self._digests.cpu()]


def _ids(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(blocks), dtype=torch.int64, device=device)
