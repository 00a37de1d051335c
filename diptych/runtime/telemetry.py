"""Traces over OTLP that cost nothing while tokens flow.

A request is followed by plain monotonic times in the structures it lives in anyway. When it ends,
each process turns its own times into finished spans (about 25 µs each) in one go, and a background
thread exports them. Without an OTLP endpoint in the environment nothing is made at all. The standard
`OTEL_*` variables work as everywhere. Prompt and completion text is never put on a span.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode

from diptych import __version__
from diptych.runtime import trace_context
from diptych.runtime.otlp import FLUSH_S, exporter_module, flush, has_endpoint, protocol_of, sdk_disabled
from diptych.runtime.trace_context import NO_TRACE, Headers, ReservedIds

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_COMPRESSION_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION")

# The codes that the semantic conventions count as the server's fault; others leave a server span unset.
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of a request that is over, to become a span.

    Times are `time.monotonic()` of this process. `error` is a short reason (never text of a prompt):
    it marks the phase in which a request failed. With a `key` the span's id is derived from its
    parent and the key, so that other processes can hang spans under it or link to it beforehand.
    """

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None
    key: str = ""
    children: tuple["PhaseSpan", ...] = ()


class Telemetry:
    """The tracing of one process; `start` reads the environment. Call it all from one thread."""

    def __init__(self, provider: TracerProvider | None, ids: ReservedIds) -> None:
        self._provider = provider
        self._ids = ids
        self._tracer = provider.get_tracer("diptych") if provider is not None else None

    @classmethod
    def start(cls, service_name: str, worker_id: str) -> "Telemetry":
        """Tracing is on when the environment names an OTLP endpoint. A collector that is away is no error.

        Name, version and instance are for want of others in `OTEL_SERVICE_NAME` and
        `OTEL_RESOURCE_ATTRIBUTES`.
        """
        ids = ReservedIds()
        _forget_variables_of_no_effect()
        if not _enabled_by_environment():
            return cls(None, ids)
        try:
            exporter = _exporter()
            if exporter is None:
                return cls(None, ids)
            resource = service_resource(service_name, worker_id)
            provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(exporter))
        except Exception as error:  # a value that the SDK cannot read is no reason not to serve
            _log.warning("no traces are sent: %s", error)
            return cls(None, ids)
        return cls(provider, ids)

    @property
    def enabled(self) -> bool:
        return self._tracer is not None

    def start_server_span(
        self,
        method: str,
        headers: Headers = NO_TRACE,
        attributes: Attributes | None = None,
        *,
        start_s: float | None = None,
        part: bool = False,
    ) -> "ServerSpan":
        """Start the SERVER span of an incoming call, child of the client's span when its headers name one.

        `method` is the span's name: of an RPC the full one, `diptych.v1.InferenceService/StreamGenerate`.
        `attributes` are those of another protocol than gRPC, whose own are there by default. `start_s` is on
        `time.monotonic()`, now if absent. A `part` of a call did not come in by itself: its span is INTERNAL.
        """
        parent = trace_context.parse(headers)
        if self._tracer is None:
            return ServerSpan(
                self, None, NO_TRACE if parent is None else trace_context.format_headers(parent)
            )
        span = self._tracer.start_span(
            method,
            context=_as_parent(parent),
            kind=SpanKind.INTERNAL if part else SpanKind.SERVER,
            start_time=None if start_s is None else int(start_s * 1e9) + _wall_clock_offset_ns(),
            attributes={"rpc.system.name": "grpc", "rpc.method": method}
            if attributes is None
            else attributes,
        )
        return ServerSpan(self, span, headers)

    def emit_phases(
        self, parent: Headers | None, phases: Sequence[PhaseSpan], links: Sequence[str] = ()
    ) -> None:
        """Make finished spans of `phases` under `parent`, children under their phases.

        `links` are keys of other children of the same parent; the top spans link to them.
        """
        if self._tracer is None or not phases:
            return
        context = trace_context.parse(parent)
        if context is not None and not context.trace_flags.sampled:
            return
        linked = [Link(trace_context.derived(context, key)) for key in links] if context is not None else []
        # One offset for all: wall clock and monotonic clock are read once, so nothing shifts inside.
        offset_ns = _wall_clock_offset_ns()
        for phase in phases:
            self._emit(phase, context, linked, offset_ns)

    def _emit(
        self, phase: PhaseSpan, parent: SpanContext | None, links: Sequence[Link], offset_ns: int
    ) -> None:
        if self._tracer is None:
            return
        if phase.key and parent is not None:
            self._ids.reserve(trace_context.derived(parent, phase.key).span_id)
        span = self._tracer.start_span(
            phase.name,
            context=_as_parent(parent),
            kind=SpanKind.INTERNAL,
            attributes=phase.attributes,
            links=links,
            start_time=int(phase.start_s * 1e9) + offset_ns,
        )
        for child in phase.children:
            self._emit(child, span.get_span_context(), (), offset_ns)
        if phase.error is not None:
            span.set_attribute("error.type", phase.error)
            span.set_status(Status(StatusCode.ERROR, phase.error))
        span.end(int(phase.end_s * 1e9) + offset_ns)

    def stop(self) -> None:
        """Export what is left, for two seconds at most; then the process may end. Blocks."""
        if self._provider is None:
            return
        # The exporter's own shutdown may wait half a minute for a collector that is gone.
        if not flush(self._provider.shutdown):
            _log.warning("the last spans were not exported within %.0f s", FLUSH_S)


class ServerSpan:
    """Start the SERVER span of one call. Without tracing it only passes the client's trace context on."""

    def __init__(self, telemetry: Telemetry, span: trace.Span | None, client: Headers) -> None:
        self._telemetry = telemetry
        self._span = span
        self._client = client

    @property
    def headers(self) -> Headers:
        """(traceparent, tracestate) for phases that are children of this span."""
        if self._span is None:
            return self._client
        return trace_context.format_headers(self._span.get_span_context())

    @property
    def trace_id(self) -> str:
        """32 hex digits for logs; empty without a trace."""
        context = trace_context.parse(self.headers)
        return f"{context.trace_id:032x}" if context is not None else ""

    def child_headers(self, key: str) -> Headers:
        """Return the headers of the child that `emit_phases(self.headers, [PhaseSpan(..., key=key)])` will
        make.

        Hand them to the workers at dispatch: their spans hang under a span that does not exist yet.
        """
        if self._span is None:
            return self._client
        return trace_context.format_headers(trace_context.derived(self._span.get_span_context(), key))

    def end(
        self,
        code: grpc.StatusCode = grpc.StatusCode.OK,
        reason: str | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        """End the span with the call's status. `reason` is the ErrorInfo reason of a failed call.

        `attributes` say what was answered in another protocol than gRPC, instead of the RPC's status code.
        """
        if self._span is None:
            return
        answer = {"rpc.response.status_code": code.name} if attributes is None else attributes
        for key, value in answer.items():
            self._span.set_attribute(key, value)
        if code is not grpc.StatusCode.OK:
            self._span.set_attribute("error.type", reason or code.name)
        if code in _SERVER_FAULTS:
            self._span.set_status(Status(StatusCode.ERROR, reason or code.name))
        self._span.end()


def service_resource(service_name: str, worker_id: str) -> Resource:
    """Return what traces, metrics and logs of a process are of, with the environment's attributes first."""
    own = Resource(
        {SERVICE_NAME: service_name, SERVICE_VERSION: __version__, "service.instance.id": worker_id}
    )
    return Resource.create(own.merge(OTELResourceDetector().detect()).attributes)


def _forget_variables_of_no_effect() -> None:
    """Empty counts as absent, says the specification, and "none" is a compression; the SDK fails on both."""
    for name, value in list(os.environ.items()):
        if name.startswith("OTEL_") and not value.strip():
            del os.environ[name]
    asked = next((os.environ[name] for name in _COMPRESSION_VARIABLES if name in os.environ), "")
    if asked.strip().lower() == "none":
        for name in _COMPRESSION_VARIABLES:  # that of traces stands against the general one
            os.environ.pop(name, None)


def _enabled_by_environment() -> bool:
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() != "none"
    return wanted and not sdk_disabled(os.environ) and has_endpoint("traces", os.environ)


def _exporter() -> SpanExporter | None:
    """Return the exporter of the protocol that the environment names; None, with a log line, if it is not
    there.
    """
    asked = protocol_of("traces", os.environ)
    try:
        module = exporter_module(asked, "trace_exporter")
    except ImportError:
        _log.warning(
            "no traces are sent: for OTEL_EXPORTER_OTLP_PROTOCOL=%s there is no exporter here; "
            "grpc needs none, http/protobuf opentelemetry-exporter-otlp-proto-http",
            asked,
        )
        return None
    exporter: SpanExporter = module.OTLPSpanExporter()
    return exporter


def _wall_clock_offset_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


def _as_parent(parent: SpanContext | None) -> otel_context.Context:
    """Return a context with only this parent: nothing ambient may become a parent by accident."""
    empty = otel_context.Context()
    return empty if parent is None else trace.set_span_in_context(NonRecordingSpan(parent), empty)


__all__ = ["NO_TRACE", "Attributes", "Headers", "PhaseSpan", "ServerSpan", "Telemetry", "service_resource"]
