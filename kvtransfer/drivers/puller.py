"""Pulls from one decode process: when to make them, how long to wait, and what came of them.

A pull is never needed: one that does not pay is not made, and what is late or broken is computed instead. It
is part of the ask, so that other prompts compute meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from diptych.runtime.failpoints import reach
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.protocol.pull_rates import PullRates
from kvtransfer.protocol.pull_table import Pull, PullPhase, PullTable
from kvtransfer.transports.base import PullChannel, TransportError

_log = logging.getLogger(__name__)
REOPEN_S = 1.0
"""Seconds between tries to open a channel that broke."""

PULLED, PARTLY, LATE, BROKEN, DECLINED = OUTCOMES = ("pulled", "partly", "late", "broken", "declined")
"""Ends of pulls: all blocks came; some came; the time was over; the channel broke; computing is cheaper."""


class Puller:
    """Pulls of one link.

    Args:
        open_channel: opens a channel whose frames go to the pulls of a table. Raises TransportError.
        block_size: tokens a block.
        on_end: `on_end(outcome, blocks, seconds)` is called for every pull, one of OUTCOMES.
    """

    def __init__(
        self,
        open_channel: Callable[[PullTable], Awaitable[PullChannel]],
        rates: PullRates,
        block_size: int,
        on_end: Callable[[str, int, float], None] = lambda outcome, blocks, seconds: None,
    ) -> None:
        self._open_channel, self._rates, self._block_size = open_channel, rates, block_size
        self._on_end = on_end
        self._channel: PullChannel | None = None
        self._table = PullTable()
        self._opening = asyncio.Lock()
        self._failed_at: float | None = None
        self._closed = False
        self._served_at = 0.0
        """End of the last pull of which all came."""

    async def pull(
        self, ref: GrantRef, first: int, source_ids: Sequence[int], block_ids: Sequence[int]
    ) -> int:
        """Pull the blocks of a grant from index `first` on into `block_ids`; return how many came.

        What is returned are verified leading blocks. When the call ends, cancelled or not, nothing is written
        to `block_ids` any more.
        """
        if not self._rates.pays():
            self._on_end(DECLINED, 0, 0.0)
            return 0
        started, came, late = time.monotonic(), 0, False
        try:
            async with asyncio.timeout(self._rates.deadline_s(len(block_ids) * self._block_size)):
                channel, table = await self._opened()
                pull, settled = _open_pull(table, ref, first, source_ids, block_ids)
                try:
                    channel.request(pull)
                    reach("prefill.pull")
                    await settled.wait()
                finally:
                    came = await _end_pull(channel, table, pull)
        except TimeoutError:
            late = True
        except TransportError:
            pass  # logged where the channel was opened
        now = time.monotonic()
        seconds = now - started
        if came == len(block_ids):
            # Pulls are served in order: the wait for an earlier one is no time of this one.
            self._rates.pulled(came * self._block_size, now - max(started, self._served_at))
            self._served_at = now
        else:
            self._rates.failed(len(block_ids) * self._block_size)
        self._on_end(_outcome(came, len(block_ids), late), came, seconds)
        return came

    def close(self) -> None:
        """End every pull, and make no more."""
        self._closed = True
        if self._channel is not None:
            self._channel.close()
        self._table.cut_all()

    async def _opened(self) -> tuple[PullChannel, PullTable]:
        """Return the channel and its table; open one if there is none. Raises TransportError."""
        async with self._opening:
            if self._channel is not None and not self._channel.broken:
                return self._channel, self._table
            now = time.monotonic()
            if self._closed or (self._failed_at is not None and now - self._failed_at < REOPEN_S):
                raise TransportError("the channel to the decode worker is closed")
            self._failed_at = now  # until it is open
            self._table = PullTable()
            try:
                self._channel = channel = await self._open_channel(self._table)
            except TransportError as error:
                _log.warning("cached blocks are computed, not pulled: %s", error)
                raise
            self._failed_at = None
            if self._closed:
                channel.close()
                raise TransportError("the link to the decode worker is closed")
            return channel, self._table


def _open_pull(
    table: PullTable,
    ref: GrantRef,
    first: int,
    source_ids: Sequence[int],
    block_ids: Sequence[int],
) -> tuple[Pull, asyncio.Event]:
    settled = asyncio.Event()
    return table.open(ref, first, source_ids, block_ids, settled.set), settled


async def _end_pull(channel: PullChannel, table: PullTable, pull: Pull) -> int:
    """Return the number of leading blocks that came, once nothing is written for this pull any more."""
    try:
        if pull.phase is PullPhase.OPEN:
            await channel.withdraw(pull)
    finally:
        came = pull.leading
        table.end(pull)
    return came


def _outcome(came: int, wanted: int, late: bool) -> str:
    if came == wanted:
        return PULLED
    if came:
        return PARTLY
    return LATE if late else BROKEN
