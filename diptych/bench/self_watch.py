"""Was it the generator that could do no more? Its own CPU time and its event loop's lateness.

All figures of a benchmark come from one event loop in one thread. A loop that is busy most of the time
stamps messages late and sends requests late, and what it reports is its own speed. A loop that is idle and
late all the same was kept off the cores by others, usually by the server on the same machine.
"""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from diptych.bench.figures import percentile

Verdict = Literal["no", "busy", "starved"]

_PERIOD_S = 0.020  # of the probe; 50 wake-ups a second cost less than 1% of a core
_BUSY_SHARE = 0.7  # of the loop's thread; above it, queueing in the generator itself shows
_LATE_MS = 5.0  # at the 99th percentile: beyond a scheduler's slice on a machine with free cores


@dataclass(frozen=True)
class Strain:
    """`cpu_share` of one core by all threads, `loop_share` by the event loop's, lateness of its timers."""

    cpu_share: float
    loop_share: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float

    @property
    def bottleneck(self) -> Verdict:
        """ "busy": the generator was at its own limit. "starved": it got no core when it needed one."""
        if self.loop_share > _BUSY_SHARE:
            return "busy"
        return "starved" if self.lag_p99_ms > _LATE_MS else "no"


class SelfWatch:
    """Watches while its block runs. The cyclic garbage collector rests meanwhile: its pauses would count."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._collected = gc.isenabled()

    async def __aenter__(self) -> Self:
        gc.collect()
        gc.disable()
        self._probe = asyncio.get_running_loop().create_task(self._look())
        self._started = (time.perf_counter(), time.process_time(), time.thread_time())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = (time.perf_counter(), time.process_time(), time.thread_time())
        if self._collected:
            gc.enable()
        self._probe.cancel()
        await asyncio.wait([self._probe])

    def strain(self) -> Strain:
        """Return the strain of the block, once it ended."""
        wall, cpu, loop = (end - start for start, end in zip(self._started, self._ended, strict=True))
        late = sorted(1000 * one for one in self._late) or [0.0]
        return Strain(
            cpu_share=cpu / wall,
            loop_share=loop / wall,
            lag_p50_ms=percentile(late, 50),
            lag_p99_ms=percentile(late, 99),
            lag_max_ms=late[-1],
        )

    async def _look(self) -> None:
        while True:
            due = time.perf_counter() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self._late.append(max(0.0, time.perf_counter() - due))
