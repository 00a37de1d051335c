"""Memory of packed weights over all processes of a system, from /proc (proc(5))."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_WEIGHTS = re.compile(r"memfd:diptych-weights")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


def weights_pss(root: int) -> int:
    """Return the sum of Pss in bytes of the weights' mappings in process `root` and all that it started."""
    total = 0
    for pid in family_of(root):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            total += pss_of((_PROC / str(pid) / "smaps").read_text())
    return total


def pss_of(smaps: str) -> int:
    """Return the bytes that the weights' mappings of one process' smaps are charged with."""
    total, counted = 0, False
    for line in smaps.splitlines():
        if _MAPPING.match(line):
            counted = _WEIGHTS.search(line) is not None
        elif counted and line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    return total


def family_of(root: int) -> Iterator[int]:
    """Yield the process and all its descendants that live now."""
    yield root
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in (_PROC / str(root) / "task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family_of(int(child))
