"""Metrics and logs over OTLP, beside the traces of `diptych.runtime.telemetry`.

Each is sent where the environment asks for it (`OTEL_METRICS_EXPORTER=otlp`, `OTEL_LOGS_EXPORTER=otlp`) and
names an endpoint. Metrics are those of `/metrics`: they are read on the event loop, as a scrape does, and
sent by another thread. Log records are queued and sent by a thread of the SDK; a full queue loses the oldest.
Nothing waits for a collector. OpenTelemetry is imported where something is sent: `diptych bench` lacks it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from diptych.runtime.log_format import request_id_of
from diptych.runtime.otlp import FLUSH_S, exporter_module, flush, has_endpoint, protocol_of, sdk_disabled
from diptych.runtime.task_cancellation import end_task

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.samples import Sample

_INTERVAL_MS: Final = 60_000  # of the OpenTelemetry specification
_OWN: Final = "opentelemetry"
"""Loggers whose records are about sending: sent, each would make the next."""
_log = logging.getLogger(__name__)


class MetricExport:
    """Sender of a registry's metrics: `start`, `close`.

    Args:
        registry: as `/metrics` has it.
        exporter: of OpenTelemetry, of any protocol.
        resource: what the metrics are of.
        interval_s: between two messages.
    """

    def __init__(self, registry: CollectorRegistry, exporter: Any, resource: Any, interval_s: float) -> None:
        self._registry = registry
        self._exporter = exporter
        self._resource = resource
        self._interval_s = interval_s
        self._started_ns = time.time_ns()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="otlp metrics")

    async def close(self) -> None:
        """Send what there is, for two seconds at most."""
        await end_task(self._task)
        data = self._data()
        await asyncio.to_thread(flush, lambda: self._finish(data))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await asyncio.to_thread(self._exporter.export, self._data())
            except Exception:
                _log.exception("metrics could not be sent; trying on")

    def _finish(self, data: Any) -> None:
        self._exporter.export(data, timeout_millis=FLUSH_S * 1000)
        self._exporter.shutdown()

    def _data(self) -> Any:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        metrics = otlp_metrics(self._registry.collect(), self._started_ns, time.time_ns())
        scope = ScopeMetrics(InstrumentationScope("diptych"), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])


def start_metric_export(
    registry: CollectorRegistry, service_name: str, worker_id: str
) -> MetricExport | None:
    """Start sending metrics; None where the environment does not ask for it."""
    exporter = _exporter("metrics", "metric_exporter", "OTLPMetricExporter")
    if exporter is None:
        return None
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    interval_ms = int(text) if text.isdecimal() and int(text) else _INTERVAL_MS
    from diptych.runtime.telemetry import service_resource

    export = MetricExport(registry, exporter, service_resource(service_name, worker_id), interval_ms / 1000)
    export.start()
    return export


def otlp_metrics(families: Iterable[Metric], started_ns: int, now_ns: int) -> list[OtlpMetric]:
    """Return the families of a registry as OpenTelemetry's metrics, with cumulative counts.

    Names are those of `/metrics`. Families of other types than counter, gauge and histogram are left out.
    """
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Histogram,
        Metric,
        NumberDataPoint,
        Sum,
    )

    cumulative = AggregationTemporality.CUMULATIVE
    found = []
    for family in families:
        data: Sum | Gauge | Histogram
        if family.type == "histogram":
            data = Histogram(_histogram_points(family.samples, started_ns, now_ns), cumulative)
            name = family.name
        elif family.type in ("counter", "gauge"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            points = [
                NumberDataPoint(dict(one.labels), started_ns, now_ns, one.value)
                for one in family.samples
                if one.name == name
            ]
            data = Sum(points, cumulative, True) if family.type == "counter" else Gauge(points)
        else:
            continue
        found.append(Metric(name, family.documentation, family.unit, data))
    return found


def _histogram_points(samples: Iterable[Sample], started_ns: int, now_ns: int) -> list[Any]:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for one in samples:
        labels = tuple((name, value) for name, value in one.labels.items() if name != "le")
        if one.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(one.labels["le"]), one.value))
        elif one.name.endswith("_sum"):
            sums[labels] = one.value
    points = []
    for labels, cumulative in buckets.items():
        cumulative.sort()
        counts = [int(count) for _, count in cumulative]
        points.append(
            HistogramDataPoint(
                dict(labels),
                started_ns,
                now_ns,
                counts[-1],
                sums.get(labels, 0.0),
                [count - before for before, count in zip([0, *counts], counts, strict=False)],
                [bound for bound, _ in cumulative[:-1]],
                None,  # type: ignore[arg-type]  # least and greatest value: the registry keeps neither
                None,  # type: ignore[arg-type]
            )
        )
    return points


class OtlpLogHandler(logging.Handler):
    """Handler that sends records over OTLP: message, severity, logger, and the request's id."""

    def __init__(self, provider: Any) -> None:
        super().__init__()
        self._provider = provider
        self._logger = provider.get_logger("diptych")

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(_OWN):
            return
        from opentelemetry._logs import LogRecord

        attributes: dict[str, Any] = {"logger.name": record.name}
        if (request_id := request_id_of(record)) is not None:
            attributes["diptych.request.id"] = request_id
        if record.exc_info:
            attributes["exception.stacktrace"] = logging.Formatter().formatException(record.exc_info)
        at = int(record.created * 1e9)
        self._logger.emit(
            LogRecord(
                timestamp=at,
                observed_timestamp=at,
                severity_text=record.levelname,
                severity_number=_severity(record.levelno),
                body=record.getMessage(),
                attributes=attributes,
            )
        )

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        provider, self._provider = self._provider, None
        if provider is not None:
            flush(provider.shutdown)
        super().close()


def log_export_handler(service_name: str, worker_id: str) -> OtlpLogHandler | None:
    """Return what sends records; None where the environment does not ask for it."""
    exporter = _exporter("logs", "_log_exporter", "OTLPLogExporter")
    if exporter is None:
        return None
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    from diptych.runtime.telemetry import service_resource

    provider = LoggerProvider(service_resource(service_name, worker_id), shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    return OtlpLogHandler(provider)


def wants_export(signal: str, environment: Mapping[str, str]) -> bool:
    """Return whether the environment asks for a signal, "metrics" or "logs", and names an endpoint."""
    asked = environment.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() == "otlp"
    return asked and not sdk_disabled(environment) and has_endpoint(signal, environment)


def _exporter(signal: str, module: str, kind: str) -> Any:
    """Return the exporter of a signal; None where none is asked for, or, with a log line, there is none."""
    if not wants_export(signal, os.environ):
        return None
    asked = protocol_of(signal, os.environ)
    try:
        return getattr(exporter_module(asked, module), kind)()
    except Exception as error:  # as with traces: a value that the SDK cannot read is no reason not to serve
        _log.warning("no %s are sent over OTLP by %s: %s", signal, asked, error)
        return None


def _severity(level: int) -> Any:
    from opentelemetry._logs import SeverityNumber

    for least, severity in (
        (logging.CRITICAL, SeverityNumber.FATAL),
        (logging.ERROR, SeverityNumber.ERROR),
        (logging.WARNING, SeverityNumber.WARN),
        (logging.INFO, SeverityNumber.INFO),
    ):
        if level >= least:
            return severity
    return SeverityNumber.DEBUG
