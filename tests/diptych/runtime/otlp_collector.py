"""A real OTLP trace collector in this process: the gRPC service that any OpenTelemetry exporter talks to."""

import threading
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans until stopped; `spans()` are (service name, span) in order of arrival."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: list[tuple[str, trace_pb2.Span]] = []
        self.versions: dict[str, str] = {}  # by service
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> Any:
        with self._arrived:
            for resource_spans in request.resource_spans:
                attributes = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
                self.versions[attributes["service.name"]] = attributes.get("service.version", "")
                for scope_spans in resource_spans.scope_spans:
                    self._spans += [(attributes["service.name"], span) for span in scope_spans.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, at_least: int = 0, timeout_s: float = 10.0) -> list[tuple[str, trace_pb2.Span]]:
        """Waits until `at_least` spans have come; raises TimeoutError otherwise."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._spans) >= at_least, timeout_s):
                raise TimeoutError(f"{len(self._spans)} of {at_least} spans came: {self._spans}")
            return list(self._spans)

    def stop(self) -> None:
        self._server.stop(0).wait()
