"""Gauges and collectors of a gateway, bound to what they show: nothing is counted before a scrape."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from diptych.runtime.gateway_metrics import GatewayMetrics
from gateway.attempt.types import Role
from gateway.metrics.adapters import AdapterMetrics, VllmLoraMetrics
from gateway.metrics.models import ModelMetrics
from gateway.metrics.vllm import VllmMetrics
from gateway.served_models.directory import ModelDirectory
from gateway.session.live_requests import LiveRequests
from gateway.worker_pool.load_metrics import LoadMetrics
from gateway.worker_pool.registry import Worker


def bind_gauges(
    registry: CollectorRegistry,
    metrics: GatewayMetrics,
    models: ModelDirectory,
    live: LiveRequests,
    *,
    unread_bytes: Callable[[], int],
    connected: Callable[[], bool],
    as_vllm: bool,
) -> None:
    """Bind all gauges of a gateway. Those of the whole gateway are sums over its models.

    Args:
        unread_bytes: returns the bytes of output that wait for slow readers.
        connected: returns whether the directory answers.
        as_vllm: show what vLLM's dashboards read as well, under the name of the first model.
    """

    def linked() -> list[tuple[str, Worker]]:
        return [
            (core.name, worker) for core in models.living for worker in core.worker_pool.registry.linked()
        ]

    metrics.running.set_function(lambda: sum(core.gate.queue.running for core in models.living))
    metrics.waiting.set_function(lambda: sum(core.gate.queue.waiting for core in models.living))
    metrics.unread_output.set_function(unread_bytes)
    metrics.directory_connected.set_function(lambda: float(connected()))
    registry.register(AdapterMetrics(lambda: ((core.name, core.adapters) for core in models), live.drivers))
    registry.register(LoadMetrics(linked))
    registry.register(ModelMetrics(models))
    if as_vllm:
        decode = Role.DECODE

        def decoding() -> list[Worker]:
            return [worker for core in models for worker in core.worker_pool.registry.serving(decode)]

        registry.register(VllmMetrics(metrics, models.first.name, decoding))

        def with_adapters() -> list[Worker]:
            return [one for core in models.living for one in core.worker_pool.registry.linked_with_text()]

        registry.register(VllmLoraMetrics(live.drivers, with_adapters))
