"""Limit on the layers that the host launches ahead of the device.

Launching a layer takes a fifth of a millisecond, computing it for a long chunk many times that: unchecked,
the host would have queued the last layer before the first is done, and an aborted request would still write
to the end.
"""

from __future__ import annotations

from collections import deque

import torch

_AHEAD = 2
"""Layers that may be queued: enough that the device never waits for the host."""
_MIN_TOKENS = 256
"""Shorter steps are done before an abort could save anything."""


def layers_ahead(device: torch.device, tokens: int) -> int | None:
    """Return how many layers of a step of so many tokens may be queued; None: all of them."""
    return _AHEAD if device.type == "cuda" and tokens >= _MIN_TOKENS else None


class LaunchThrottle:
    """Limit of one step, waited for before each layer."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        self._ahead = layers_ahead(device, tokens)
        self._queued: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Wait until at most two layers are queued; on a CPU, and for short steps, not at all."""
        if self._ahead is None:
            return
        event = torch.cuda.Event(blocking=True)  # two layers are queued: waking late delays nothing
        event.record()
        self._queued.append(event)
        if len(self._queued) > self._ahead:
            self._queued.popleft().synchronize()
