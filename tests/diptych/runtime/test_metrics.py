from prometheus_client import CollectorRegistry, generate_latest

from diptych.runtime.metrics import DecodeMetrics, GatewayMetrics, PrefillMetrics, new_registry


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
