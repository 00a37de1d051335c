"""Number of cores that this process may use, by its CPU affinity and the limits of its control groups.

A container with a CPU limit sees all cores of its machine; when it has used up its time it stands still for
the rest of a tenth of a second. The threads of a step wait for one another, so with more threads than the
limit has cores every step would stand still as well.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

_OWN_GROUPS = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of whole cores, at least one.

    The fraction of a limit is left to the threads that pass tokens on.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    limit = cpu_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def cpu_limit(own_groups: Path = _OWN_GROUPS, root: Path = _CGROUP) -> float | None:
    """Return the limit in cores of the tightest group around this process; None where none has a limit."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:  # not Linux
        return None
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "cpu" if controllers else root
        # A container may see its own group as the root, whatever its path is outside.
        group = PurePosixPath(path)
        for one in (group, *group.parents):
            limit = _limit(mount / one.relative_to("/"))
            if limit is not None:
                found.append(limit)
    return min(found, default=None)


def _limit(group: Path) -> float | None:
    """Return the limit of one group in cores: version 2 of control groups has one file, version 1 has two."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / file).read_text() for file in files).split()
            if int(quota) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError):  # no such file, or no limit: "max"; in version 1 that is -1
            continue
    return None
