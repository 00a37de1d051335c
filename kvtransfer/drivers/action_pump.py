"""Performs actions one by one, in the order in which they were decided.

A callback may cause further events. Their actions wait behind those that were decided before: were an Abort
to overtake the Grant that it takes back, the writer would deny the grant and then receive it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Action = TypeVar("Action")
_log = logging.getLogger(__name__)


class ActionPump(Generic[Action]):
    """Calls `perform` for each action, never from within another action."""

    def __init__(self, perform: Callable[[Action], None]) -> None:
        self._perform = perform
        self._pending: deque[Action] = deque()
        self._running = False

    def run(self, actions: Iterable[Action]) -> None:
        """Perform them now, or after those that are being performed.

        An action that raises is logged, and the rest goes on: one request's error must not keep another
        request's blocks.
        """
        self._pending.extend(actions)
        if self._running:
            return
        self._running = True
        try:
            while self._pending:
                action = self._pending.popleft()
                try:
                    self._perform(action)
                except Exception:
                    _log.exception("%s failed", type(action).__name__)
        finally:
            self._running = False
