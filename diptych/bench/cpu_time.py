"""CPU time from /proc: of the machine, of other guests of its hypervisor, and of processes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PROC = Path("/proc")
_STAT = _PROC / "stat"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
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
        """Read the machine's times; zeros where there is no /proc."""
        try:
            return cls.parse(_STAT.read_text())
        except OSError:
            return cls(0, 0, 0)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the first line: cpu user nice system idle iowait irq softirq steal guest guest_nice."""
        ticks = [int(field) for field in text.split("\n", 1)[0].split()[1:9]]
        return cls(sum(ticks), ticks[3] + ticks[4], ticks[7])

    def busy_since(self, earlier: CpuTime) -> float:
        """Return the share of all cores' time that was not idle."""
        return self._share(earlier, (self.total - self.idle) - (earlier.total - earlier.idle))

    def steal_since(self, earlier: CpuTime) -> float:
        return self._share(earlier, self.steal - earlier.steal)

    def stolen_till_now(self) -> str:
        """Return a line that stands below a table: tails that other guests make look like ours."""
        return f"{self.now().steal_since(self):.1%} of the cores' time stolen by the hypervisor"

    def _share(self, earlier: CpuTime, ticks: int) -> float:
        passed = self.total - earlier.total
        return ticks / passed if passed else 0.0


def busy_now() -> float:
    """Return the share of the cores that is in use now, while none of our servers runs."""
    before = CpuTime.now()
    time.sleep(_SAMPLE_S)
    return CpuTime.now().busy_since(before)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, ended threads included. Raises OSError when it has ended."""
    return cpu_ticks(pid) * _TICK_S


def cpu_ticks(pid: int, proc: Path = _PROC) -> int:
    """Return the user and system time of a process in clock ticks."""
    fields = _stat_of(pid, proc)
    return int(fields[11]) + int(fields[12])


def main_thread_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process's main thread."""
    return cpu_ticks(pid, _PROC / str(pid) / "task") * _TICK_S


def family_of(pid: int, proc: Path = _PROC) -> list[int]:
    """Return a process and all its living descendants, parents before their children."""
    parents: dict[int, int] = {}
    for entry in proc.glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int(_stat_of(int(entry.name), proc)[1])
        except OSError:
            continue  # it ended while we looked
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family


def _stat_of(pid: int, proc: Path) -> list[str]:
    """Return the fields of proc(5) after the command's name, which may hold spaces and parentheses of its
    own.
    """
    return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
