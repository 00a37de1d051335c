"""Gauges of a gateway, bound to its models' workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from diptych.runtime.gateway_metrics import GatewayMetrics
from gateway.metrics.adapters import VllmLoraMetrics
from gateway.metrics.gauges import bind_gauges
from gateway.worker_pool.codec import Load
from tests.gateway.worker_pool.test_encoder_routes import Pool


def test_adapters_of_a_step_are_counted_without_encode_workers() -> None:
    pool = Pool(own_encoder=True, encoders=("e",)).pool
    for worker_id in ("p", "d"):
        pool.registry.require(worker_id).load = Load(max_loras=8)
    core = SimpleNamespace(name="m", worker_pool=pool)
    bound: list[Any] = []
    bind_gauges(
        cast(Any, SimpleNamespace(register=bound.append)),
        GatewayMetrics(CollectorRegistry()),
        cast(Any, SimpleNamespace(living=[core], first=core)),
        cast(Any, SimpleNamespace(drivers=lambda: ())),
        unread_bytes=lambda: 0,
        connected=lambda: True,
        as_vllm=True,
    )
    [collector] = [one for one in bound if isinstance(one, VllmLoraMetrics)]
    [family] = collector.collect()
    assert [sample.labels["max_lora"] for sample in family.samples] == ["8"]
