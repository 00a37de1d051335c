"""Prefill worker's end of a transport that copies into mapped memory: what was begun, and what is done."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from kvtransfer.transports.base import Run, StillGranted
from kvtransfer.transports.blocking import finished


class MappedChannel(ABC):
    """Copies of runs, which cannot be called back, and their counts."""

    def __init__(self) -> None:
        self._sent = self._acknowledged = 0
        self._closed = False

    @property
    def sent(self) -> int:
        """Number of blocks whose copies were started."""
        return self._sent

    @property
    def acknowledged(self) -> int:
        """Number of blocks whose copies are done."""
        return self._acknowledged

    @property
    def broken(self) -> bool:
        """False: there is no connection that could break, the stream's end shows the loss."""
        return False

    async def send(self, run: Run, still_granted: StillGranted) -> list[bytes] | None:
        """Copy a run; returns when it lies in the decode worker's memory. Raises TransportError.

        A copy that was started cannot be called back: until it is done there is no promise to stop.
        """
        if not still_granted(run.ref):
            return None
        count = len(run.block_ids)
        self._sent += count
        try:
            return await finished(asyncio.ensure_future(self._copied(run)))
        finally:
            self._acknowledged += count

    def close(self) -> None:
        """Copy no more. Call it when no `send` runs."""
        if not self._closed:
            self._closed = True
            self._unmap()

    @abstractmethod
    async def _copied(self, run: Run) -> list[bytes]:
        """Copy a run and return the digest of each block. Raises TransportError."""

    @abstractmethod
    def _unmap(self) -> None:
        """End the threads that copy, and give the mapped memory back."""
