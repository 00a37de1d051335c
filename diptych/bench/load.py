"""How much load is put on a server: one point on the axis of a plot."""

from __future__ import annotations

from dataclasses import dataclass

INFINITE = float("inf")


@dataclass(frozen=True)
class Load:
    """`max_concurrency` requests in flight at most (None: any number), sent at `request_rate` a second.

    An infinite rate with a concurrency is a closed loop: each client sends when its last answer ended.
    A finite one is an open loop, in which requests come whether or not the server keeps up.
    `request_rate` None replays a trace at its own times.
    """

    request_rate: float | None = INFINITE
    max_concurrency: int | None = None
    burstiness: float = 1.0

    @property
    def closed(self) -> bool:
        return self.request_rate == INFINITE and self.max_concurrency is not None

    @property
    def label(self) -> str:
        """For a table: "C=8", "2 req/s", "2 req/s, C≤8"."""
        if self.closed:
            return f"C={self.max_concurrency}"
        rate = "trace" if self.request_rate is None else f"{self.request_rate:g} req/s"
        return rate if self.max_concurrency is None else f"{rate}, C≤{self.max_concurrency}"
