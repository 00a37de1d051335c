"""The workers' load on the gateway's /metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from gateway.worker_pool.codec import Load
from gateway.worker_pool.load_metrics import LoadMetrics


def worker(worker_id: str, role: str, load: Load) -> Any:
    return SimpleNamespace(record=SimpleNamespace(worker_id=worker_id, role=role), load=load)


def page(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_page_has_each_linked_worker_with_its_roles_gauges() -> None:
    workers = [
        worker("p", "prefill", Load(running=1, waiting=2, waiting_tokens=300)),
        worker("d", "decode", Load(4, 5, 0, 30, 40, 3, draining=True)),
    ]
    registry = CollectorRegistry()
    registry.register(LoadMetrics(lambda: [("m", one) for one in workers]))
    prefill, decode = '{model="m",role="prefill",worker_id="p"}', '{model="m",role="decode",worker_id="d"}'
    assert page(registry) == [
        f"diptych_worker_requests_running{prefill} 1.0",
        f"diptych_worker_requests_running{decode} 4.0",
        f"diptych_worker_requests_waiting{prefill} 2.0",
        f"diptych_worker_requests_waiting{decode} 5.0",
        f"diptych_worker_draining{prefill} 0.0",
        f"diptych_worker_draining{decode} 1.0",
        f"diptych_worker_waiting_tokens{prefill} 300.0",
        f"diptych_worker_kv_cache_utilization{decode} 0.25",
        f"diptych_worker_kv_cache_blocks{decode} 40.0",
        f"diptych_worker_kv_cache_free_blocks{decode} 30.0",
        f"diptych_worker_kv_cache_quarantined_blocks{decode} 3.0",
    ]
    workers.clear()
    assert page(registry) == []


def test_worker_without_a_report_has_zero_utilization() -> None:
    registry = CollectorRegistry()
    registry.register(LoadMetrics(lambda: [("m", worker("d", "decode", Load()))]))
    assert 'diptych_worker_kv_cache_utilization{model="m",role="decode",worker_id="d"} 0.0' in page(registry)


def test_second_collector_of_the_same_names_is_refused() -> None:
    registry = CollectorRegistry()
    registry.register(LoadMetrics(list))
    again: Collector = LoadMetrics(list)
    with pytest.raises(ValueError, match="diptych_worker_draining"):
        registry.register(again)
