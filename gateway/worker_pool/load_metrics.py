"""The load of each linked worker on the gateway's /metrics, as the worker last reported it.

Workers that `diptych up` starts listen on any free port; here all of them are in one place that stays. Their
own pages have what only they know: steps, handoffs, hits in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.attempt.types import Role
from gateway.worker_pool.codec import Load
from gateway.worker_pool.registry import Worker


class _Gauge(NamedTuple):
    """A gauge of a worker's load; ``role``: the workers that have it, None = all."""

    name: str
    meaning: str
    value: Callable[[Load], float]
    role: Role | None = None


def _utilization(load: Load) -> float:
    return 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0


_GAUGES = (
    _Gauge("requests_running", "Requests that the worker computes", lambda load: load.running),
    _Gauge("requests_waiting", "Requests that wait at the worker", lambda load: load.waiting),
    _Gauge("draining", "1 while the worker takes nothing new", lambda load: load.draining),
    _Gauge(
        "waiting_tokens", "Prompt tokens still to prefill", lambda load: load.waiting_tokens, Role.PREFILL
    ),
    _Gauge(
        "kv_cache_utilization", "Share of KV blocks that requests hold, 0 to 1", _utilization, Role.DECODE
    ),
    _Gauge("kv_cache_blocks", "KV blocks of the worker", lambda load: load.total_blocks, Role.DECODE),
    _Gauge(
        "kv_cache_free_blocks",
        "Of these, those that no request holds; they may hold prefixes",
        lambda load: load.free_blocks,
        Role.DECODE,
    ),
    _Gauge(
        "kv_cache_quarantined_blocks",
        "Blocks of aborted grants whose writer has not yet promised to stop",
        lambda load: load.quarantined_blocks,
        Role.DECODE,
    ),
)


class LoadMetrics(Collector):
    """Collector of the linked workers' load. It keeps nothing: a worker that left is gone from the page."""

    def __init__(self, workers: Callable[[], Sequence[tuple[str, Worker]]]) -> None:
        """Create a collector over what ``workers`` returns: the linked ones, each after its model's name."""
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """Yield all families; one whose role has no worker is empty."""
        workers = self._workers()
        for name, meaning, value, role in _GAUGES:
            family = GaugeMetricFamily(
                f"diptych_worker_{name}", meaning, labels=("worker_id", "role", "model")
            )
            for model, worker in workers:
                if role is None or worker.record.role == role.value:
                    labels = (worker.record.worker_id, worker.record.role, model)
                    family.add_metric(labels, value(worker.load))
            yield family

    def describe(self) -> Iterable[Metric]:
        """Return the families, by which a registry refuses a second collector of the same names."""
        return self.collect()
