"""The interface of what keeps packed weights for all processes of a host."""

from __future__ import annotations

from typing import Protocol


class WeightStore(Protocol):
    """Files of packed weights of this host, by their key (packed_key.py)."""

    def obtain(self, key: str) -> int | None:
        """Return the file of `key`, which is the caller's to close; None: the caller is to pack it.

        Then `publish` or `give_up` follows. Raises OSError where there is no store.
        """
        ...

    def publish(self, key: str, file: int) -> None:
        """Give all others the whole and sealed file of `key`. Raises OSError."""
        ...

    def give_up(self, key: str) -> None:
        """Leave it to another process to pack the file of `key`."""
        ...
