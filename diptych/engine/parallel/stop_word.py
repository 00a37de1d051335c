"""The word by which rank 0 stops a step between two layers, for all ranks before the same layer.

Ranks that stopped before different layers would wait for one another for ever. Rank 0 therefore decides
before layer n that layer n + 1 is not computed. All ranks exchange numbers within layer n, rank 0 after it
has written the word, so that each of them has seen it when it gets to layer n + 1.

Where exchanges are queued on a device, the host of a rank gets to layer n + 1 before that exchange. But a
long step's hosts are held to so many layers ahead of their devices (launch_throttle.py): with two, a host
that gets to layer n + 3 has waited for the exchange within layer n, and so for the word. So rank 0 decides
before layer n that layer n + 3 is not computed. That costs no wait that was not there before.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

NEVER = np.iinfo(np.int64).max


def first_common_layer(layer: int, ahead: int) -> int:
    """Return the first layer before which every rank sees a word that rank 0 writes before `layer`.

    `ahead` is the number of layers that a host may launch while its device has not done those before; 0 where
    hosts wait for every exchange.
    """
    return layer + ahead + 1


class StopWord:
    """The number of the first layer that is not computed, an int64 in a page that all ranks map."""

    def __init__(self, fd: int | None = None) -> None:
        """Map the page of file `fd`, or use one of this process alone. Raises OSError."""
        self._page = mmap.mmap(-1 if fd is None else fd, mmap.PAGESIZE)
        self._word = np.frombuffer(self._page, dtype=np.int64, count=1)
        if fd is None:
            self.reset()

    @staticmethod
    def file() -> int:
        """Return the file of a new page that no rank has mapped yet."""
        fd = os.memfd_create("diptych-stop", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    def reset(self) -> None:
        """Let the next step compute all layers. Only rank 0 calls it, while no rank computes."""
        self._word[0] = NEVER

    def stop_before(self, layer: int) -> None:
        """Stop all ranks before `layer`, to which none has come yet. Only rank 0 calls it."""
        self._word[0] = min(int(self._word[0]), layer)

    def stops(self, layer: int) -> bool:
        """Return whether `layer` and those after it are not computed."""
        return layer >= int(self._word[0])


class RunToEnd(StopWord):
    """The word of a group without common memory, where every step computes all layers."""

    def stop_before(self, layer: int) -> None:
        """Do nothing: another rank would not see it."""
