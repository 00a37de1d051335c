from prometheus_client import CollectorRegistry, generate_latest

from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.metrics import new_registry
from diptych.runtime.worker_metrics import DecodeMetrics, PrefillMetrics


def names(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in registry.collect()}


def test_the_published_names() -> None:
    gateway, prefill, decode = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    GatewayMetrics(gateway)
    PrefillMetrics(prefill)
    DecodeMetrics(decode)
    every_role = {
        "diptych_request_phase_duration_seconds",
        "diptych_requests_running",
        "diptych_requests_waiting",
    }
    assert every_role <= names(gateway) & names(prefill) & names(decode)
    assert names(gateway) >= {
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "rpc_server_call_duration_seconds",
        "diptych_route_decisions",
        "diptych_retries",
        "diptych_rejections",
    }
    assert names(decode) >= {
        "diptych_kv_cache_utilization",
        "diptych_prefix_cache_queries",
        "diptych_prefix_cache_hits",
        "diptych_preemptions",
    }
    transfer = {f"diptych_kv_transfer_{what}" for what in ("duration_seconds", "bytes", "failures")}
    assert transfer <= names(prefill) & names(decode)


def test_workers_label_steps_with_their_role_and_create_series_of_their_transports() -> None:
    registry = CollectorRegistry()
    metrics = PrefillMetrics(registry)
    metrics.create_transport_series(["tcp"])
    metrics.step_duration.observe(0.5)
    value = registry.get_sample_value
    assert value("diptych_engine_step_duration_seconds_sum", {"role": "prefill"}) == 0.5
    assert value("diptych_engine_step_tokens_total", {"role": "prefill"}) == 0
    assert value("diptych_kv_transfer_bytes_total", {"transport": "tcp"}) == 0
    assert value("diptych_kv_transfer_failures_total", {"transport": "none"}) == 0
    phase = {"role": "prefill", "phase": "kv_alloc_wait"}
    assert value("diptych_request_phase_duration_seconds_count", phase) == 0


def test_every_error_that_refuses_a_request_has_a_series_of_rejections() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    reasons = {
        sample.labels["reason"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "diptych_rejections_total"
    }
    assert reasons >= {"QUEUE_FULL", "KV_CAPACITY", "DEADLINE_UNATTAINABLE", "QUOTA_EXCEEDED"}
    assert reasons >= {
        "NO_READY_WORKER",
        "DRAINING",
        "GRAMMAR_NOT_CHECKED",
        "WORKER_LOST",
        "KV_TRANSFER_FAILED",
    }
    assert not reasons & {"INVALID_PARAMETER", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL"}


def test_token_latency_divides_the_time_of_tokens_that_came_together() -> None:
    registry = CollectorRegistry()
    latency = GatewayMetrics(registry).token_latency
    latency.observe(0.1, 4)
    latency.observe(9.0, 1)
    value, name = registry.get_sample_value, "diptych_inter_token_latency_seconds"
    assert value(f"{name}_bucket", {"le": "0.01"}) == 0
    assert value(f"{name}_bucket", {"le": "0.025"}) == 4
    assert value(f"{name}_bucket", {"le": "2.5"}) == 4
    assert value(f"{name}_bucket", {"le": "+Inf"}) == value(f"{name}_count") == 5
    assert value(f"{name}_sum") == 9.1


def test_each_role_labels_its_load() -> None:
    registry = new_registry()
    metrics = DecodeMetrics(registry)
    metrics.running.set(3)
    metrics.waiting.set_function(lambda: 4)
    metrics.kv_transfer_bytes.labels("shared_memory").inc(5)
    text = generate_latest(registry).decode()
    assert 'diptych_requests_running{role="decode"} 3.0' in text
    assert 'diptych_requests_waiting{role="decode"} 4.0' in text
    assert 'diptych_kv_transfer_bytes_total{transport="shared_memory"} 5.0' in text
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text
