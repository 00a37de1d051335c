"""The adapters that a runner's steps can read, by slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from diptych.engine.backend import AdapterBackend


class AdapterSlots:
    """The adapters that steps can read, by slot. They are placed on the thread that begins the next step."""

    def __init__(self, backend: AdapterBackend) -> None:
        self._backend = backend
        self._waiting: deque[tuple[int, object | None]] = deque()
        self._filled: set[int] = set()
        self.prepare = backend.prepare_adapter

    def place(self, slot: int, prepared: object | None) -> None:
        """Place an adapter before the next step."""
        self._waiting.append((slot, prepared))

    def ready(self) -> Collection[int]:
        """Place what waits, and return the slots that have an adapter."""
        while self._waiting:
            slot, prepared = self._waiting.popleft()
            self._backend.set_adapter(slot, prepared)
            (self._filled.discard if prepared is None else self._filled.add)(slot)
        return self._filled
