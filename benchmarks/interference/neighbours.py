"""How much of the cores others used meanwhile: a figure that was measured beside them is not one of ours."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
        return cls(
            time.monotonic(), user + nice + system + irq + softirq + steal, _of_tree(proc, os.getpid())
        )

    def others_since(self, earlier: Ticks, cores: int) -> float:
        """Share of all cores, 0 .. 1, that neither idled nor worked for us; what other guests took counts."""
        seconds = max(self.moment - earlier.moment, 1e-3)
        ticks = (self.all - earlier.all) - (self.own - earlier.own)
        return max(0.0, ticks / os.sysconf("SC_CLK_TCK") / seconds / cores)


def _of_tree(proc: Path, root: int) -> int:
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command's name, in parentheses, may hold spaces and parentheses of its own.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        pid = int(entry.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    return sum(used for pid, used in ticks.items() if _descends(pid, root, parents))


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    seen: set[int] = set()
    while pid not in seen and pid:
        if pid == root:
            return True
        seen.add(pid)
        pid = parents.get(pid, 0)
    return False
