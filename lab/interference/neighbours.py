"""Share of the cores that other processes used meanwhile: a figure measured beside them is no result."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from diptych.bench.cpu_time import cpu_ticks, family_of

_PROC = Path("/proc")


@dataclass(frozen=True)
class Ticks:
    """Clock ticks since boot (proc(5)): of all that ran, and of this process and its living descendants."""

    moment: float
    all: int
    own: int

    @classmethod
    def now(cls, proc: Path = _PROC) -> Self:
        """Zeros where there is no /proc."""
        try:
            fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return cls(time.monotonic(), 0, 0)
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
        return cls(time.monotonic(), user + nice + system + irq + softirq + steal, _of_family(proc))

    def others_since(self, earlier: Ticks, cores: int) -> float:
        """Share of all cores, 0 .. 1, that neither idled nor worked for us; what other guests took counts."""
        seconds = max(self.moment - earlier.moment, 1e-3)
        ticks = (self.all - earlier.all) - (self.own - earlier.own)
        return max(0.0, ticks / os.sysconf("SC_CLK_TCK") / seconds / cores)


def _of_family(proc: Path) -> int:
    ticks = 0
    for pid in family_of(os.getpid(), proc):
        with contextlib.suppress(OSError):  # it ended while we looked
            ticks += cpu_ticks(pid, proc)
    return ticks
