"""Metrics and logs over OTLP: into a real collector's services, and never in the way of a program."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diptych.runtime.otlp_export import (
    log_export_handler,
    otlp_metrics,
    start_metric_export,
    wants_export,
)


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer, logs_service_pb2_grpc.LogsServiceServicer):
    """Both services on one port."""

    def __init__(self) -> None:
        self._came = threading.Condition()
        self.requests: list[Any] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self, self._server)
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        with self._came:
            self.requests.append(request)
            self._came.notify_all()
        if isinstance(request, logs_service_pb2.ExportLogsServiceRequest):
            return logs_service_pb2.ExportLogsServiceResponse()
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def first(self) -> Any:
        with self._came:
            assert self._came.wait_for(lambda: self.requests, 60)
            return self.requests[0]

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.port}")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    yield made
    made.stop()


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("requests", "Requests", ["reason"], registry=made).labels("stop").inc(3)
    Gauge("running", "Those that run", registry=made).set(2.5)
    seconds = Histogram("wait_seconds", "Waits", ["phase"], buckets=(0.1, 1.0), registry=made)
    for value in (0.05, 0.5, 0.7, 30.0):
        seconds.labels("queue").observe(value)
    return made


def test_families_become_sums_gauges_and_histograms(registry: CollectorRegistry) -> None:
    found = {one.name: one.data for one in otlp_metrics(registry.collect(), 1, 2)}
    assert set(found) == {"requests_total", "running", "wait_seconds"}
    total, running, waits = found["requests_total"], found["running"], found["wait_seconds"]
    assert (total.data_points[0].value, total.data_points[0].attributes) == (3, {"reason": "stop"})
    assert running.data_points[0].value == 2.5
    (point,) = waits.data_points
    assert (list(point.bucket_counts), list(point.explicit_bounds)) == ([1, 2, 1], [0.1, 1.0])
    assert (point.count, point.sum, point.attributes) == (4, pytest.approx(31.25), {"phase": "queue"})


def test_metrics_reach_a_collector(collector: Collector, registry: CollectorRegistry) -> None:
    async def run() -> Any:
        export = start_metric_export(registry, "diptych-decode", "d-1")
        assert export is not None
        try:
            return await asyncio.to_thread(collector.first)
        finally:
            await export.close()

    (of_resource,) = asyncio.run(run()).resource_metrics
    attributes = {one.key: one.value.string_value for one in of_resource.resource.attributes}
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("diptych-decode", "d-1")
    metrics = {one.name: one for one in of_resource.scope_metrics[0].metrics}
    assert metrics["requests_total"].sum.is_monotonic
    assert metrics["requests_total"].sum.data_points[0].as_double == 3
    assert list(metrics["wait_seconds"].histogram.data_points[0].bucket_counts) == [1, 2, 1]


def test_log_records_reach_a_collector_with_the_requests_id(collector: Collector) -> None:
    handler = log_export_handler("diptych-gateway", "g-1")
    assert handler is not None
    for name, level in (("gateway.call", logging.ERROR), ("opentelemetry.exporter", logging.ERROR)):
        handler.handle(logging.LogRecord(name, level, "x.py", 1, "request %s: it failed", ("req-7",), None))
    handler.close()
    (of_resource,) = collector.first().resource_logs
    (record,) = of_resource.scope_logs[0].log_records
    attributes = {one.key: one.value.string_value for one in record.attributes}
    assert (record.body.string_value, record.severity_text) == ("request req-7: it failed", "ERROR")
    assert attributes["diptych.request.id"] == "req-7"


def test_collector_that_is_away_holds_nothing_up(collector: Collector, registry: CollectorRegistry) -> None:
    collector.stop()

    async def run() -> None:
        export = start_metric_export(registry, "diptych-decode", "d-1")
        handler = log_export_handler("diptych-decode", "d-1")
        assert export is not None
        assert handler is not None
        handler.handle(logging.LogRecord("x", logging.INFO, "x.py", 1, "ready", (), None))
        await asyncio.sleep(0.2)
        await export.close()
        handler.close()

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),  # traces alone, as ever
        ({"OTEL_METRICS_EXPORTER": "otlp"}, False),
        ({"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        (
            {
                "OTEL_METRICS_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x",
                "OTEL_SDK_DISABLED": "true",
            },
            False,
        ),
    ],
)
def test_environment_says_what_is_sent(environment: dict[str, str], wanted: bool) -> None:
    assert wants_export("metrics", environment) is wanted
