"""Tenants whose last image file was refused, which take turns at one slow lane.

A flood of hostile files costs others little if each refused file delays its tenant's next one. From many
tenants at once it would still be a flood: so that all of them together send as many as one lane takes. A file
that is an image leads out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

MOST_KNOWN: Final = 4096
"""Tenants that are remembered; of more the oldest are forgotten."""


class Suspects:
    """The lane of one decoder."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()
        self._lane = asyncio.Lock()
        self._free_at = 0.0

    def accept(self, tenant: str) -> None:
        """Let a tenant out, whose file was an image."""
        self._known.pop(tenant, None)

    def refuse(self, tenant: str) -> None:
        """Send a tenant into the lane, from its next file on."""
        self._known[tenant] = None
        self._known.move_to_end(tenant)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, pause_s: float) -> AsyncIterator[None]:
        """Wait for this tenant's turn, if it is in the lane; the next one's comes `pause_s` after its end."""
        if tenant not in self._known:
            yield
            return
        async with self._lane:
            await asyncio.sleep(self._free_at - time.monotonic())
            try:
                yield
            finally:  # also of callers that leave
                self._free_at = time.monotonic() + pause_s
