"""Copies of pieces of blocks on a GPU with their digests: a conversion of heads and layers a piece.

The kernel's digests are 64 bits a piece and block. A share's hash is made of those of its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_shares import KVShare
from kernels.convert_blocks import HeadRange, KVView, block_major
from kernels.copy_blocks import bind
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.held_blocks import Pieces
from kvtransfer.transports.rank_data import share_hash


class DigestedPieces:
    """Copy of pieces of blocks of one memory to pieces of blocks of another, or their digests alone.

    The digests are of the bytes that were read, bound to (slot, generation, index) and to their place in the
    piece.
    """

    def __init__(
        self, source: KVMemory, block_ids: Sequence[int], pieces: Pieces, ref: GrantRef, first: int
    ) -> None:
        self._source, self._ids, self._pieces = source, block_ids, pieces
        self._ref, self._first = ref, first
        self._kept: list[torch.Tensor] = []
        self._found: torch.Tensor | None = None

    def launch(
        self, target: KVMemory | None = None, target_ids: Sequence[int] = (), target_pieces: Pieces = ()
    ) -> None:
        """Queue the work on the current stream of the source's device, which has to be the current one.

        Nothing is written without a target. It does not wait for the stream.
        """
        # Needs Triton, which CPU installs may not have.
        from kernels.gpu.convert_blocks import convert_blocks, digest_blocks

        device, count = self._source.device, len(self._ids)
        rows = np.zeros((3, count), np.int64)
        rows[0] = self._ids
        rows[2] = bind(self._ref.slot, self._ref.generation, np.arange(self._first, self._first + count))
        if target is not None:
            rows[1] = target_ids
        ids, places, bound = _to_device(torch.from_numpy(rows), device)
        tokens = count * self._source.layout.block_size
        digests = torch.empty(len(self._pieces), count, dtype=torch.int64, device=device)
        for at, piece in enumerate(self._pieces):
            view, heads = _view(self._source, piece)
            if target is None:
                own = range(heads.start, heads.stop)
                digest_blocks(view, ids, own, tokens, digests=digests[at], binding=bound)
                continue
            there, begin = _view(target, target_pieces[at])
            shared = HeadRange(heads.start, begin.start, len(heads))
            convert_blocks(view, ids, there, places, shared, tokens, digests=digests[at], binding=bound)
        self._found = torch.empty(digests.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._found.copy_(digests, non_blocking=True)
        self._kept = [ids, places, bound, digests]  # until the kernels have run

    def hashes(self) -> list[bytes]:
        """Return the hash of each block's share. Call it when the work is done.

        Raises RuntimeError before `launch`.
        """
        if self._found is None:
            raise RuntimeError("the copy was not launched")
        return [share_hash(block.tobytes()) for block in self._found.t().contiguous().numpy()]


def _view(memory: KVMemory, piece: KVShare) -> tuple[KVView, range]:
    """Return the layers of a piece as keys and values, and its heads in them.

    The two halves of a latent stand for keys and values: a copy does not mind what they mean.
    """
    layer, head = memory.origin
    heads = range(piece.heads.start - head, piece.heads.stop - head)
    blocks = memory.data.narrow(1, piece.layers.start - layer, len(piece.layers))
    layout = memory.layout
    if not layout.latent:
        return block_major(blocks, layout.head_dim), heads
    tokens = blocks[:, :, 0].unflatten(-1, (layout.block_size, layout.head_dim))
    half = layout.head_dim // 2
    if layout.head_dim % 2:
        raise ValueError(f"latents of {layout.head_dim} numbers have no halves")
    return KVView(tokens[..., :half], tokens[..., half:]), heads


def _to_device(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return rows.to(device)
    return rows.pin_memory().to(device, non_blocking=True)
