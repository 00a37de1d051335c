"""docs/observability.md lists what the three programs export, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.metrics import new_registry
from diptych.runtime.worker_metrics import DecodeMetrics, EncodeMetrics, PrefillMetrics
from gateway.access.journal import Journal
from gateway.access.shared_quota.leases import QuotaLeases
from gateway.access.shared_quota.store import PoolStore
from gateway.metrics.adapters import AdapterMetrics, VllmLoraMetrics
from gateway.metrics.models import ModelMetrics
from gateway.metrics.vllm import VllmMetrics
from gateway.served_models.directory import ModelDirectory
from gateway.worker_pool.load_metrics import LoadMetrics

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"


def test_documented_metrics_equal_exported_metrics() -> None:
    gateway, prefill, decode, encode = new_registry(), *(CollectorRegistry() for _ in range(3))
    metrics = GatewayMetrics(gateway)
    models = ModelDirectory(lambda *_: pytest.fail("no model is added"), lambda: None)
    gateway.register(LoadMetrics(list))
    gateway.register(ModelMetrics(models))
    gateway.register(VllmMetrics(metrics, "m", list))
    gateway.register(AdapterMetrics(lambda: (), list))
    gateway.register(VllmLoraMetrics(list, list))
    Journal(gateway, None, "g")
    QuotaLeases(PoolStore("redis://127.0.0.1:1", "g"), gateway)
    PrefillMetrics(prefill)
    DecodeMetrics(decode)
    EncodeMetrics(encode)
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for registry in (gateway, prefill, decode, encode)
        for family in registry.collect()
    }
    words = re.findall(r"`([a-z0-9_]+(?::[a-z0-9_]+)?)`", PAGE.read_text())
    prefixes = ("diptych_", "gen_ai_server_", "rpc_server_call", "http_server_", "process_", "vllm:")
    assert {word for word in words if word.startswith(prefixes)} == exported
