"""Metrics under vLLM's names, as inference gateways and dashboards scrape them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.metrics import new_registry
from gateway.metrics.vllm import VllmMetrics, kv_cache_usage
from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import collect, running, valkey
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering


def decode_worker(free: int, total: int) -> Any:
    return SimpleNamespace(load=SimpleNamespace(free_blocks=free, total_blocks=total))


def test_vllm_metrics_sum_the_gateway_metrics_over_other_labels() -> None:
    registry = new_registry()
    metrics = GatewayMetrics(registry)
    registry.register(VllmMetrics(metrics, "m", lambda: [decode_worker(30, 40), decode_worker(60, 60)]))
    metrics.running.set_function(lambda: 3)
    metrics.waiting.set(2)
    metrics.input_tokens.inc(100)
    metrics.cached_input_tokens.inc(64)
    metrics.retries.labels("preempted").inc(5)
    metrics.retries.labels("worker_lost").inc(7)
    metrics.time_to_first_token.labels("chat", "diptych", "m").observe(0.3)
    metrics.time_to_first_token.labels("text_completion", "diptych", "m").observe(0.03)
    metrics.request_duration.labels("chat", "diptych", "m", "").observe(1.0)
    metrics.request_duration.labels("chat", "diptych", "m", "QUEUE_FULL").observe(2.0)
    metrics.token_latency.observe(0.06, 3)
    metrics.phases["prefill"].observe(0.25)
    for reason in ("stop", "time_limit", "cancelled"):
        metrics.choices_ended.labels(reason).inc()

    page = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    values = {
        (sample.name, sample.labels.get("le", sample.labels.get("finished_reason"))): sample.value
        for family in families.values()
        if family.name.startswith("vllm:")
        for sample in family.samples
    }
    assert values["vllm:num_requests_running", None] == 3
    assert values["vllm:num_requests_waiting", None] == 2
    assert values["vllm:kv_cache_usage_perc", None] == pytest.approx(0.1)
    assert values["vllm:prefix_cache_queries_total", None] == values["vllm:prompt_tokens_total", None] == 100
    assert values["vllm:prefix_cache_hits_total", None] == 64
    assert values["vllm:num_preemptions_total", None] == 5
    assert values["vllm:time_to_first_token_seconds_count", None] == 2
    assert values["vllm:time_to_first_token_seconds_bucket", "0.04"] == 1
    assert values["vllm:time_to_first_token_seconds_bucket", "+Inf"] == 2
    assert values["vllm:e2e_request_latency_seconds_sum", None] == pytest.approx(3.0)
    assert values["vllm:inter_token_latency_seconds_count", None] == 3
    assert values["vllm:inter_token_latency_seconds_bucket", "0.01"] == 0
    assert values["vllm:inter_token_latency_seconds_bucket", "0.025"] == 3
    assert values["vllm:request_prefill_time_seconds_sum", None] == 0.25
    assert values["vllm:request_decode_time_seconds_count", None] == 0
    reasons = ("stop", "length", "abort", "error")
    assert [values["vllm:request_success_total", reason] for reason in reasons] == [1, 0, 2, 0]
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    assert {sample.labels["model_name"] for sample in families["vllm:prompt_tokens"].samples} == {"m"}


def test_kv_cache_usage_is_zero_without_workers() -> None:
    assert kv_cache_usage([]) == 0.0


async def test_gateway_exports_vllm_metrics_if_configured(bundled: ServedModel) -> None:
    with valkey() as url:
        workers = ScriptedPrefill(), ScriptedDecode(answering([1, 2, 3]))
        async with running(bundled, url, *workers, metrics_compat="vllm") as stack:
            await collect(stack.stub.StreamGenerate(stack.request()))
            await stack.until_idle()
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{stack.gateway.http_port}/metrics") as answer,
            ):
                page = await answer.text()
    labels = f'{{engine="0",model_name="{bundled.card.name}"}}'
    assert f"vllm:generation_tokens_total{labels} 3.0" in page
    assert f"vllm:num_requests_running{labels} 0.0" in page
    assert f"vllm:inter_token_latency_seconds_count{labels} 2.0" in page
    assert f"vllm:request_generation_tokens_sum{labels} 3.0" in page
    assert f"vllm:request_queue_time_seconds_count{labels} 1.0" in page
    ended = f'engine="0",finished_reason="stop",model_name="{bundled.card.name}"'
    assert f"vllm:request_success_total{{{ended}}} 1.0" in page
    assert "diptych_output_tokens_total 3.0" in page
