"""Workers that are much slower than their peers get no new requests for a while. Pure; time is an argument.

A worker reports how long its recent steps took, by size class. It is an outlier when in every class that
others report as well its median is `factor` times theirs or more; after `strikes_s` of that it is ejected. Of
one role never more than half are, and so never the only one: slow is better than nothing. An ejection lasts
`first_s`, then the worker is on probation: it gets work again, and the first slow report ejects it anew, for
twice as long each time, up to `longest_s`. A probation without one clears its record.

The idea is that of Envoy's outlier detection, with step times in the place of its error counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.worker_pool.codec import StepTime


@dataclass(frozen=True, slots=True)
class EjectionPolicy:
    """The limits of ejection: seconds, but for the first three. Differences below ``floor_s`` never count."""

    factor: float = 3.0
    least_steps: int = 4  # of a class, before its median counts
    most_ejected: float = 0.5  # of the workers of a role, rounded down
    floor_s: float = 0.02
    strikes_s: float = 1.0
    first_s: float = 10.0
    longest_s: float = 300.0
    probation_s: float = 20.0


@dataclass(slots=True)
class _Record:
    role: str
    times: Mapping[int, float]  # median seconds by size class
    slow_since: float | None = None
    slowness: float = 1.0
    ejections: int = 0
    until: float = -math.inf  # ejected until then, on probation for a while after it


class Ejections:
    """The ejected workers, from the load reports of all linked ones."""

    def __init__(self, policy: EjectionPolicy | None = None) -> None:
        self._policy = policy or EjectionPolicy()
        self._records: dict[str, _Record] = {}

    def record(self, worker_id: str, role: str, step_times: Sequence[StepTime], now: float) -> None:
        """Record a worker's recent steps, at least one, and eject it if it is an outlier for too long."""
        policy = self._policy
        times = {one.size_class: one.median_s for one in step_times if one.steps >= policy.least_steps}
        record = self._records.setdefault(worker_id, _Record(role, times))
        record.times = times
        if now < record.until:
            return  # its steps now are of work from before
        if record.ejections and now >= record.until + policy.probation_s:
            record.ejections = 0
        slowness = self._slowness(worker_id, record)
        if slowness is None or slowness < policy.factor:
            record.slow_since = None
            return
        record.slowness = slowness
        record.slow_since = now if record.slow_since is None else record.slow_since
        grace_s = 0.0 if record.ejections else policy.strikes_s
        if now - record.slow_since >= grace_s and self._may_eject(record.role, now):
            length = min(policy.first_s * 2.0**record.ejections, policy.longest_s)
            record.ejections += 1
            record.until = now + length
            record.slow_since = None

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is gone, or whose place another process took."""
        self._records.pop(worker_id, None)

    def is_ejected(self, worker_id: str, now: float) -> bool:
        record = self._records.get(worker_id)
        return record is not None and now < record.until

    def reason(self, worker_id: str, now: float) -> str:
        """Return the reason of an ejection or probation for operators; empty for any other worker."""
        record = self._records.get(worker_id)
        if record is None or not record.ejections or now >= record.until + self._policy.probation_s:
            return ""
        slow = f"its steps took {record.slowness:.1f} times as long as its peers'"
        if now < record.until:
            return f"ejected for {record.until - now:.0f} s more: {slow}"
        return f"on probation: {slow}"

    def _slowness(self, worker_id: str, record: _Record) -> float | None:
        """Return its step time over its peers' median, in the size class that is best for it."""
        others = [r.times for w, r in self._records.items() if r.role == record.role and w != worker_id]
        ratios = []
        for size_class, own in record.times.items():
            theirs = _median(times[size_class] for times in others if size_class in times)
            if theirs is not None:
                ratios.append(own / theirs if own - theirs > self._policy.floor_s and theirs > 0 else 1.0)
        return min(ratios, default=None)

    def _may_eject(self, role: str, now: float) -> bool:
        peers = [record for record in self._records.values() if record.role == role]
        ejected = sum(now < record.until for record in peers)
        return ejected + 1 <= int(len(peers) * self._policy.most_ejected)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
