"""Rank 0's end of what other ranks do with memories that processes of two workers map; see `MappedRanks`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from diptych.worker_process.group.orders import (
    CheckShares,
    FenceWriter,
    MapTargets,
    NoteSource,
    OfferMemory,
    UnmapTargets,
)
from diptych.worker_process.group.remote_rank import RemoteRank
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.share_mapping import CheckRun, CopyRun, MapTarget, SourceListener


class GroupMappings:
    """The ranks of a group but rank 0, by holder, and one of their memories, by its number."""

    def __init__(self, number: int, ranks: Sequence[RemoteRank]) -> None:
        self._number, self._ranks = number, ranks

    def offer(self, secret: bytes, on_event: SourceListener) -> list[Future[str]]:
        """See `MappedRanks.offer`."""
        for holder, rank in enumerate(self._ranks, start=1):
            rank.shares.on_source.append(partial(on_event, holder))
        return [
            rank.shares.ask(lambda request: OfferMemory(request, self._number, secret))
            for rank in self._ranks
        ]

    def note_source(self, holder: int, source: WriterId) -> None:
        """See `MappedRanks.note_source`."""
        self._ranks[holder - 1].shares.tell(NoteSource(source))

    def fence_writer(self, holder: int, writer: int) -> None:
        """See `MappedRanks.fence_writer`."""
        self._ranks[holder - 1].shares.tell(FenceWriter(writer))

    def check_shares(self, holder: int, run: CheckRun) -> Future[list[bytes]]:
        """See `MappedRanks.check_shares`."""
        return self._ranks[holder - 1].shares.ask(lambda request: CheckShares(request, run))

    def map_targets(self, holder: int, channel: int, targets: Sequence[MapTarget]) -> Future[None]:
        """See `MappedRanks.map_targets`."""
        rank = self._ranks[holder - 1]
        return rank.shares.ask(lambda request: MapTargets(request, channel, tuple(targets)))

    def copy_shares(self, holder: int, channel: int, run: CopyRun) -> Future[list[bytes]]:
        """See `MappedRanks.copy_shares`."""
        return self._ranks[holder - 1].copy_shares(self._number, channel, run)

    def unmap_targets(self, holder: int, channel: int) -> None:
        """See `MappedRanks.unmap_targets`."""
        self._ranks[holder - 1].shares.tell(UnmapTargets(channel))
