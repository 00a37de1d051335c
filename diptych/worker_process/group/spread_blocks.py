"""Whole blocks of a group whose ranks have memories of their own: gathered, scattered and copied by rank 0.

    gather   own shares from own memory, the rest from the ranks that hold them: what a handoff sends
    scatter  each rank's share of what was brought, among the plans of steps: a step that reads a block comes
             after its bytes, and bytes for a block that was freed come before whatever is written next
    by rank  shares that ranks send and receive themselves, on rank 0's word alone; one that came is placed as
             one that is scattered

A draft model's segment of a block lies in rank 0's memory alone, behind its share. It goes with whole blocks,
and not by rank.

So the protocol of the handoff, its grants and promises, is that of single processes. A handoff is by rank;
whole blocks are gathered and scattered where a prefix is pulled, or the other worker knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from functools import partial

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import KVShare, whole_share
from diptych.worker_process.group.mapped_ranks import GroupMappings
from diptych.worker_process.group.orders import ClosePushes, DropShare, EndSession
from diptych.worker_process.group.remote_rank import RemoteRank
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.blocking import queued_work
from kvtransfer.transports.held_blocks import Pieces, copy_pieces, read_pieces, write_pieces
from kvtransfer.transports.host_blocks import host_view
from kvtransfer.transports.rank_data import PushTarget, RankEvent


class SpreadShares:
    """The shares of one memory's blocks; see `SpreadBlocks`.

    Args:
        memory: rank 0's: of whole blocks, in which all processes of its host write their shares, or with room
            for rank 0's share alone.
        number: the memory's number in plans.
        own: shares that are in `memory`.
        others: ranks with memories of their own, and their shares.
        devices: UUID of each holder's GPU; none: all have host memory.
    """

    def __init__(
        self,
        memory: KVMemory,
        number: int,
        own: Sequence[KVShare],
        others: Sequence[tuple[RemoteRank, KVShare]],
        devices: Sequence[str] = (),
    ) -> None:
        # The same bytes: the memory itself, which has this object, is dropped when nothing else has it.
        self._memory = memory.as_share_of(memory.layout, *memory.origin)
        self._layout, self._draft = memory.layout, memory.draft
        self._number, self._own, self._others = number, own, others
        self._ranks = [rank for rank, _ in others]
        self.holders: Holders = (tuple(own), *((share,) for _, share in others))
        """See `RankBlocks.holders`."""
        self.devices: Sequence[str] = devices or [""] * len(self.holders)
        """See `RankBlocks.devices`."""
        self.mapped = GroupMappings(number, self._ranks)
        """See `RankBlocks.mapped`."""

    def gather_block(self, block: int) -> memoryview:
        """See `SpreadBlocks.gather_block`. Ends the process where a rank does not answer."""
        payload = torch.zeros(self._layout.bytes_per_block, dtype=torch.uint8)
        whole = self._numbers(payload)
        for share in self._own:
            self._put(whole, share, read_pieces(self._memory, block, [share]))
        for rank, share in self._others:
            self._put(whole, share, rank.read_share(self._number, block))
        if self._draft is not None:
            drafted = read_pieces(self._draft, block, [whole_share(self._draft.layout)])
            payload[self._drafted].copy_(torch.frombuffer(drafted, dtype=torch.uint8))
        return host_view(payload)

    def _put(self, whole: torch.Tensor, share: KVShare, payload: bytearray | memoryview) -> None:
        place = share.of(whole)
        place.copy_(torch.frombuffer(payload, dtype=self._layout.dtype).view(place.shape))

    def _numbers(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the model's own numbers in the bytes of a block, a view."""
        return payload[: self._layout.own_bytes].view(self._layout.dtype).view(self._layout.block_shape)

    @property
    def _drafted(self) -> slice:
        """Place of the draft model's segment in the bytes of a block."""
        assert self._layout.draft is not None
        begin = self._layout.draft_offset
        return slice(begin, begin + self._layout.draft.own_bytes)

    def scatter_block(self, block: int, payload: memoryview) -> None:
        """See `SpreadBlocks.scatter_block`."""
        whole = self._numbers(torch.frombuffer(payload, dtype=torch.uint8))
        for share in self._own:
            write_pieces(self._memory, block, [share], _bytes_of(share.of(whole)))
        for rank, share in self._others:
            rank.write_share(self._number, block, bytearray(_bytes_of(share.of(whole))))
        if self._draft is not None:
            write_pieces(self._draft, block, [whole_share(self._draft.layout)], payload[self._drafted])

    def copy_block(self, src: int, dst: int) -> None:
        """See `SpreadBlocks.copy_block`."""
        copy_pieces(self._memory, src, dst, self._own)
        for rank, _ in self._others:
            rank.copy_block(self._number, src, dst)
        if self._draft is not None:
            copy_pieces(self._draft, src, dst, [whole_share(self._draft.layout)])

    def await_writes(self) -> None:
        """See `SpreadBlocks.await_writes`. Ends the process where a rank does not answer."""
        queued = queued_work(self._memory)
        for rank, _ in self._others:
            rank.await_writes(self._number)
        if queued is not None:
            queued.synchronize()

    def without_draft(self) -> SpreadShares:
        """See `SpreadBlocks.without_draft`."""
        own = copy(self)
        own._layout, own._draft = self._layout.without_draft(), None
        return own

    # -- by rank

    def listen(self, secret: bytes, on_event: Callable[[int, RankEvent], None]) -> list[Future[str]]:
        """See `RankBlocks.listen`."""
        for holder, rank in enumerate(self._ranks, start=1):
            rank.shares.on_event = partial(on_event, holder)
        return [rank.listen(self._number, secret) for rank in self._ranks]

    def place_share(self, holder: int, staged: int, block: int, pieces: Pieces) -> None:
        """See `RankBlocks.place_share`."""
        self._ranks[holder - 1].place_share(self._number, block, staged, pieces)

    def drop_share(self, holder: int, staged: int) -> None:
        """See `RankBlocks.drop_share`."""
        self._ranks[holder - 1].shares.tell(DropShare(staged))

    def end_session(self, holder: int, session: int) -> None:
        """See `RankBlocks.end_session`."""
        self._ranks[holder - 1].shares.tell(EndSession(session))

    def open_pushes(self, holder: int, channel: int, targets: Sequence[PushTarget]) -> Future[None]:
        """See `RankBlocks.open_pushes`."""
        return self._ranks[holder - 1].open_pushes(channel, targets)

    def push_share(self, holder: int, channel: int, block: int, ref: GrantRef, index: int) -> Future[bytes]:
        """See `RankBlocks.push_share`."""
        return self._ranks[holder - 1].push_share(self._number, channel, block, ref, index)

    def close_pushes(self, holder: int, channel: int) -> None:
        """See `RankBlocks.close_pushes`."""
        self._ranks[holder - 1].shares.tell(ClosePushes(channel))

    def fail(self, error: BaseException) -> None:
        """See `RankBlocks.fail`."""
        self._ranks[0].fail(error)


def _bytes_of(numbers: torch.Tensor) -> memoryview:
    return host_view(numbers.flatten().view(torch.uint8))
