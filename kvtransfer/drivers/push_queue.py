"""Queue of blocks that a copying transport sends in order, beside the computation of the next ones."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from diptych.runtime.send_queue import SendQueue
from kvtransfer.protocol.lease import TransferProgress
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.base import PushChannel, Run, StillGranted, TransportError

_log = logging.getLogger(__name__)


class PushQueue:
    """Send queue of one link.

    Args:
        still_granted: asked between blocks; a run of a revoked grant is dropped.
        on_sent: called with the digests after each run.
        on_broken: called when the transport fails.
    """

    def __init__(
        self,
        channel: PushChannel,
        still_granted: StillGranted,
        on_sent: Callable[[GrantRef, int, list[bytes]], None],
        on_broken: Callable[[], None],
        progress: TransferProgress,
    ) -> None:
        self._channel, self._progress = channel, progress
        self._still_granted, self._on_sent, self._on_broken = still_granted, on_sent, on_broken
        self._runs: SendQueue[Run] = SendQueue()
        self._pending: Counter[GrantRef] = Counter()
        self._idle: dict[GrantRef, list[Callable[[], None]]] = {}
        self._ended = False
        self._task = asyncio.create_task(self._work())

    def put(self, run: Run) -> None:
        """Send these blocks after all earlier ones. They must not change until `when_idle` calls back."""
        if not self._ended:
            self._pending[run.ref] += 1
            self._runs.put(run)

    def when_idle(self, ref: GrantRef, done: Callable[[], None]) -> None:
        """Call `done` once no byte of this grant will be read again; at once if that is so now."""
        if self._pending[ref] == 0:
            del self._pending[ref]
            done()
        else:
            self._idle.setdefault(ref, []).append(done)

    async def flush(self, ref: GrantRef) -> None:
        """Wait until every block of the grant was sent or dropped."""
        flushed = asyncio.Event()
        self.when_idle(ref, flushed.set)
        await flushed.wait()

    def stalled(self, now: float) -> bool:
        """Return True if sent blocks are not acknowledged. Call it at the interval of `progress`."""
        channel = self._channel
        if self._ended:
            return False
        return channel.broken or self._progress.stalled(now, channel.sent, channel.acknowledged)

    def cancel(self) -> None:
        """Drop the rest of the queue and close the channel, soon."""
        self._task.cancel()

    async def close(self) -> None:
        """Drop the rest of the queue and close the channel; a caller cancelled meanwhile is cancelled."""
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _work(self) -> None:
        try:
            while runs := await self._runs.take():
                for run in runs:
                    await self._send(run)
                    self._finished(run.ref)
        except TransportError as error:
            _log.warning("%s", error)
            self._on_broken()
        except Exception:  # a bug or an unknown kind of failure: the blocks do not arrive
            _log.exception("a transport failed")
            self._on_broken()
        finally:
            self._ended = True
            self._runs.close()
            self._channel.close()
            for ref in list(self._pending):
                self._pending[ref] = 1
                self._finished(ref)

    async def _send(self, run: Run) -> None:
        if self._still_granted(run.ref):
            digests = await self._channel.send(run, self._still_granted)
            if digests is not None:
                self._on_sent(run.ref, run.first, digests)

    def _finished(self, ref: GrantRef) -> None:
        self._pending[ref] -= 1
        if self._pending[ref] <= 0:
            del self._pending[ref]
            for done in self._idle.pop(ref, []):
                done()
