"""Which workers died under a request, as far as a gateway can know.

A broken link proves nothing: the process may be dead, frozen, or behind a cable that somebody pulled. It is
counted as a death, unproven, until the very same process is linked again; when another takes its place, under
its id or as one that says whom it replaces, the death is proven. A worker that had said it would go, drained
and restarted by its operator, is not counted at all. What only another worker reports (its link to the peer
broke) makes the peer a suspect: it counts once this gateway loses it, too.

Pure. Workers are named by their ids.
"""

from __future__ import annotations


class FailedWorkers:
    """Of one request, over all its choices."""

    def __init__(self) -> None:
        self._gone: set[str] = set()  # dead, unless they come back
        self._suspects: set[str] = set()  # somebody lost them while they had the request
        self._buried = 0

    @property
    def deaths(self) -> int:
        return self._buried + len(self._gone)

    @property
    def unproven(self) -> int:
        """Those of the deaths that may turn out to be a broken link only."""
        return len(self._gone)

    def suspect(self, worker_id: str) -> None:
        """Another worker lost it while both had the request."""
        self._suspects.add(worker_id)

    def suspected(self, worker_id: str) -> bool:
        return worker_id in self._suspects

    def gone(self, worker_id: str, *, left: bool) -> None:
        """This gateway lost it while it had the request. ``left``: as it had said it would."""
        self._suspects.discard(worker_id)
        if not left:
            self._gone.add(worker_id)

    def up(self, worker_id: str, *, returned: bool) -> None:
        """It is linked: the same process, or another in its place."""
        self._suspects.discard(worker_id)
        if worker_id in self._gone:
            self._gone.discard(worker_id)
            self._buried += not returned
