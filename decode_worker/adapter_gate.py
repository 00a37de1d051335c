"""Slots of adapters for attempts that wait for blocks: each takes one with its grant, and not before.

So an attempt that waits for a slot holds no block, and one that has blocks needs no further slot here.
"""

from __future__ import annotations

from collections.abc import Callable

from diptych.worker_process.adapter_store import AdapterUse
from kvtransfer.protocol.messages import Key


class AdapterGate:
    """See `kvtransfer.protocol.grants.GrantGate`."""

    def __init__(self, find: Callable[[Key], AdapterUse | None]) -> None:
        """`find` returns the use of an adapter by an attempt; None: it is one of the base model."""
        self._find = find

    def may_grant(self, key: Key) -> bool:
        """Return whether an attempt needs no slot, or can have one now; else it waits in line."""
        use = self._find(key)
        return use is None or use.may_place()

    def granted(self, key: Key) -> None:
        """Take the slot."""
        use = self._find(key)
        if use is not None:
            use.place()
