"""Metrics of each model that a gateway serves: version, requests, workers, and shares of aliases.

Nothing is counted while requests run: all is read at each scrape. A model that is gone is gone from the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.attempt.types import TEXT_ROLES, Role
from gateway.served_models.core import ModelCore
from gateway.served_models.directory import ModelDirectory

_INFO = "Always 1; the digest is the version of the model's files"
_RUNNING = "Requests of a model that workers have"
_WAITING = "Requests of a model that wait in the gateway"
_QUOTA = "KV memory that this gateway may use beside others"
_READY = "Workers that can take requests"
_WANTED = "Workers that a role needs for its load and the targets of TTFT and ITL"
_CHANGES = "Changes to a role that this gateway ordered"
_WEIGHT = "Weight of a model in an alias"


class ModelMetrics(Collector):
    """Collector of a gateway's models."""

    def __init__(self, models: ModelDirectory) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield all families, with each model and each role."""
        info = GaugeMetricFamily("diptych_model_info", _INFO, labels=("model", "digest"))
        running = GaugeMetricFamily("diptych_model_requests_running", _RUNNING, labels=("model",))
        waiting = GaugeMetricFamily("diptych_model_requests_waiting", _WAITING, labels=("model",))
        quota = GaugeMetricFamily("diptych_kv_quota_tokens", _QUOTA, labels=("model",))
        for core in self._models:
            queue = core.gate.queue
            info.add_metric((core.name, core.digest), 1)
            running.add_metric((core.name,), queue.running)
            waiting.add_metric((core.name,), queue.waiting)
            quota.add_metric((core.name,), queue.kv.usable or 0)
        yield from (info, running, waiting, quota, *_by_role(self._models))
        weights = GaugeMetricFamily("diptych_model_alias_weight", _WEIGHT, labels=("alias", "model"))
        for alias in self._models.aliases:
            for share in alias.shares:
                weights.add_metric((alias.name, share.model), share.weight)
        yield weights

    def describe(self) -> Iterable[Metric]:
        """Return the families, by which a registry refuses a second collector of the same names."""
        return self.collect()


def _by_role(models: Iterable[ModelCore]) -> tuple[Metric, ...]:
    ready = GaugeMetricFamily("diptych_workers_ready", _READY, labels=("role", "model"))
    wanted = GaugeMetricFamily("diptych_wanted_workers", _WANTED, labels=("role", "model"))
    changes = CounterMetricFamily("diptych_role_changes", _CHANGES, labels=("role", "model"))
    for core in models:
        registry = core.worker_pool.registry
        for role in Role:
            labels = (role.value, core.name)
            ready.add_metric(labels, len(registry.serving(role)))
            if role in TEXT_ROLES:
                wanted.add_metric(labels, core.auto_roles.wanted_count(role))
                changes.add_metric(labels, core.roles.done[role])
    return ready, wanted, changes
