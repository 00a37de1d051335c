"""Copies of blocks on a GPU with their digests, in one launch for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kv_memory import KVMemory
from kernels.copy_blocks import bind
from kvtransfer.messages import GrantRef

NOWHERE = -1
"""A place for blocks that are to be left where they are."""


class DigestedCopy:
    """Blocks of one memory to places of another, with digests bound to (slot, generation, index).

    The digests are of what was read. They are others than the host's xxh3: both ends of a pair have the same
    kind of memory. The generation stands for the request, being given once.
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
        self._kept: list[torch.Tensor] = []
        self._digests: torch.Tensor | None = None

    def launch(self) -> None:
        """Queue the copy on the current stream of the source's device, which has to be the current one."""
        # Needs Triton, which CPU installs may not have.
        from kernels.gpu.copy_blocks import copy_blocks

        device = self._source.data.device
        count = len(self._source_ids)
        source_ids, target_ids = (
            torch.tensor(list(ids), dtype=torch.int64, device=device)
            for ids in (self._source_ids, self._target_ids)
        )
        indices = torch.arange(self._first, self._first + count, dtype=torch.int64, device=device)
        binding = bind(self._ref.slot, self._ref.generation, indices)
        self._digests = torch.zeros(count, dtype=torch.int64, device=device)
        self._kept = [source_ids, target_ids, binding]  # until the kernel has run
        copy_blocks(
            self._source.data,
            source_ids,
            self._target.data,
            target_ids,
            digests=self._digests,
            binding=binding,
        )

    def digests(self) -> list[bytes]:
        """Of each block; zero of those that were left. Call it when the copy is done.

        As long as the host's digests are: frames have one form.
        """
        if self._digests is None:
            raise RuntimeError("the copy was not launched")
        return [int(digest).to_bytes(16, "little", signed=True) for digest in self._digests.tolist()]
