"""What the cores did, from /proc/stat: who else ran, and what the hypervisor took."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_STAT = Path("/proc/stat")
_SAMPLE_S = 0.5


@dataclass(frozen=True)
class CpuTime:
    """Ticks of all cores since boot (proc(5)): `idle` with waiting for disks, `steal` given to other
    guests."""

    total: int
    idle: int
    steal: int

    @classmethod
    def now(cls) -> Self:
        """Zeros where there is no /proc."""
        try:
            return cls.parse(_STAT.read_text())
        except OSError:
            return cls(0, 0, 0)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the first line: cpu user nice system idle iowait irq softirq steal guest guest_nice."""
        ticks = [int(field) for field in text.split("\n", 1)[0].split()[1:9]]
        return cls(sum(ticks), ticks[3] + ticks[4], ticks[7])

    def busy_since(self, earlier: CpuTime) -> float:
        """Share of all cores' time that was not idle."""
        return self._share(earlier, (self.total - self.idle) - (earlier.total - earlier.idle))

    def steal_since(self, earlier: CpuTime) -> float:
        return self._share(earlier, self.steal - earlier.steal)

    def stolen_till_now(self) -> str:
        """In words, to stand below a table: tails of others' making look like ours."""
        return f"{self.now().steal_since(self):.1%} of the cores' time stolen by the hypervisor"

    def _share(self, earlier: CpuTime, ticks: int) -> float:
        passed = self.total - earlier.total
        return ticks / passed if passed else 0.0


def busy_now() -> float:
    """Share of the cores that is in use while none of our servers runs: what else does."""
    before = CpuTime.now()
    time.sleep(_SAMPLE_S)
    return CpuTime.now().busy_since(before)
