"""Copies of blocks on a GPU with their digests, in one launch for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from diptych.engine.kv.kv_memory import KVMemory
from kernels.copy_blocks import bind
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.host_blocks import DIGEST_BYTES

NOWHERE = -1
"""Mark in place of a block: as a target, the block is only read; as a source, nothing is read or written."""


class DigestedCopy:
    """Copy of blocks of one memory to blocks of another, with digests bound to (slot, generation, index).

    The digests are of the bytes that were read. They differ from the host's xxh3: both ends have the same
    kind of memory. The generation stands for the request, as it is given once.
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
        if len(source_ids) != len(target_ids):
            raise ValueError(f"{len(source_ids)} source blocks for {len(target_ids)} target blocks")
        self._source, self._target = source, target
        self._source_ids, self._target_ids = source_ids, target_ids
        self._ref, self._first = ref, first
        self._kept: list[torch.Tensor] = []
        self._found: torch.Tensor | None = None

    def launch(self) -> None:
        """Queue the copy on the current stream of the source's device, which has to be the current one.

        It does not wait for the stream: what crosses between host and device is page-locked.
        """
        # Needs Triton, which CPU installs may not have.
        from kernels.gpu.copy_blocks import copy_blocks

        device = self._source.data.device
        count = len(self._source_ids)
        # By numpy, which reads a list in an eighth of torch's time.
        rows = np.empty((3, count), np.int64)
        rows[0], rows[1] = self._source_ids, self._target_ids
        rows[2] = bind(self._ref.slot, self._ref.generation, np.arange(self._first, self._first + count))
        source_ids, target_ids, bound = _to_device(torch.from_numpy(rows), device)
        digests = torch.empty(count, dtype=torch.int64, device=device)
        copy_blocks(
            self._source.blocks, source_ids, self._target.blocks, target_ids, digests=digests, binding=bound
        )
        self._found = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._found.copy_(digests, non_blocking=True)
        self._kept = [source_ids, target_ids, bound, digests]  # until the kernel has run

    def digests(self) -> list[bytes]:
        """Return the digest of each block, zero where the source is NOWHERE. Call it when the copy is done.

        Digests are as long as the host's, by repeating the sign, so that frames have one form. Raises
        RuntimeError before `launch`.
        """
        if self._found is None:
            raise RuntimeError("the copy was not launched")
        words = torch.stack([self._found, self._found >> 63], dim=1).numpy()
        digests: list[bytes] = words.view(f"V{DIGEST_BYTES}").ravel().tolist()
        return digests


def _to_device(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return rows.to(device)
    return rows.pin_memory().to(device, non_blocking=True)
