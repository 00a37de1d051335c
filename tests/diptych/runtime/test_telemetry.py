import os
import sys
import time
from collections.abc import Iterator

import grpc
import pytest

from diptych import __version__
from diptych.runtime.telemetry import PhaseSpan, Telemetry
from tests.diptych.runtime.otlp_collector import OtlpCollector

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = bytes.fromhex("0af7651916cd43dd8448eb211c80319c")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    collector = OtlpCollector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    yield collector
    collector.stop()


def test_one_trace_through_three_processes(collector: OtlpCollector) -> None:
    """The tree of a request: spans made at the end, in any order, by processes that share only headers."""
    gateway = Telemetry.start("diptych-gateway", "g")
    prefill = Telemetry.start("diptych-prefill", "p")
    decode = Telemetry.start("diptych-decode", "d")
    server = gateway.start_server_span("diptych.v1.InferenceService/StreamGenerate", (CLIENT, "vendor=1"))
    chat = server.child_headers("chat")
    now = time.monotonic()
    wall = time.time()
    decode.emit_phases(chat, [PhaseSpan("decode", now - 1, now)], links=["prefill/1"])
    queue = PhaseSpan("queue", now - 3, now - 2)
    compute = PhaseSpan("prefill", now - 2, now - 1, {"diptych.chunks": 3}, error="PEER_LOST")
    prefill.emit_phases(
        chat, [PhaseSpan("prefill", now - 3, now - 1, key="prefill/1", children=(queue, compute))]
    )
    gateway.emit_phases(
        server.headers, [PhaseSpan("chat m", now - 4, now, {"gen_ai.request.model": "m"}, key="chat")]
    )
    server.end(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
    for telemetry in (gateway, prefill, decode):
        telemetry.stop()

    spans = collector.spans(at_least=6)
    services = ("diptych-gateway", "diptych-prefill", "diptych-decode")
    assert collector.versions == dict.fromkeys(services, __version__)
    assert all(span.trace_id == TRACE_ID and span.trace_state == "vendor=1" for _, span in spans)
    by_name = {(service, span.name): span for service, span in spans}
    server_span = by_name["diptych-gateway", "diptych.v1.InferenceService/StreamGenerate"]
    chat_span = by_name["diptych-gateway", "chat m"]
    decode_span = by_name["diptych-decode", "decode"]
    prefill_spans = {span.span_id: span for service, span in spans if service == "diptych-prefill"}
    assert server_span.parent_span_id.hex() == "b7ad6b7169203331"
    assert server_span.kind == server_span.SPAN_KIND_SERVER
    assert server_span.status.code == server_span.status.STATUS_CODE_ERROR
    assert chat_span.parent_span_id == server_span.span_id
    assert decode_span.parent_span_id == chat_span.span_id
    outer = prefill_spans[decode_span.links[0].span_id]
    assert outer.parent_span_id == chat_span.span_id
    inner = {s.name: s for s in prefill_spans.values() if s.parent_span_id == outer.span_id}
    assert set(inner) == {"queue", "prefill"}
    assert inner["prefill"].status.code == inner["prefill"].status.STATUS_CODE_ERROR
    assert inner["queue"].end_time_unix_nano - inner["queue"].start_time_unix_nano == pytest.approx(
        1e9, abs=2
    )
    assert decode_span.end_time_unix_nano == pytest.approx(wall * 1e9, abs=0.2e9)


def test_two_requests_of_one_client_trace_do_not_share_ids(collector: OtlpCollector) -> None:
    telemetry = Telemetry.start("diptych-gateway", "g")
    first, second = (telemetry.start_server_span("s/M", (CLIENT, "")) for _ in range(2))
    assert first.child_headers("chat") != second.child_headers("chat")
    assert first.child_headers("chat")[0].split("-")[1] == TRACE_ID.hex()
    telemetry.stop()


@pytest.mark.parametrize(
    "parent", [None, ("", ""), ("garbage", ""), ("00-" + "0" * 32 + "-b7ad6b7169203331-01", "")]
)
def test_without_a_usable_parent_a_span_is_a_root(
    collector: OtlpCollector, parent: tuple[str, str] | None
) -> None:
    telemetry = Telemetry.start("diptych-decode", "d")
    telemetry.emit_phases(parent, [PhaseSpan("decode", 1.0, 2.0, key="k")], links=["other"])
    telemetry.stop()
    [(_, span)] = collector.spans(at_least=1)
    assert span.parent_span_id == b""
    assert not span.links


def test_an_unsampled_client_trace_makes_no_spans(collector: OtlpCollector) -> None:
    telemetry = Telemetry.start("diptych-gateway", "g")
    server = telemetry.start_server_span("s/M", (CLIENT[:-2] + "00", ""))
    telemetry.emit_phases(server.headers, [PhaseSpan("chat", 1.0, 2.0)])
    server.end()
    telemetry.emit_phases(None, [PhaseSpan("control", 1.0, 2.0)])
    telemetry.stop()
    assert [span.name for _, span in collector.spans(at_least=1)] == ["control"]


def test_another_protocol_brings_its_own_attributes(collector: OtlpCollector) -> None:
    telemetry = Telemetry.start("diptych-gateway", "g")
    span = telemetry.start_server_span("POST /x", attributes={"http.request.method": "POST"})
    span.end(grpc.StatusCode.UNAVAILABLE, "DRAINING", {"http.response.status_code": 503})
    telemetry.stop()
    ((_, found),) = collector.spans(at_least=1)
    assert {a.key for a in found.attributes} == {
        "http.request.method",
        "http.response.status_code",
        "error.type",
    }
    assert found.status.code == found.status.STATUS_CODE_ERROR


def test_a_client_fault_does_not_mark_the_server_span_as_failed(collector: OtlpCollector) -> None:
    telemetry = Telemetry.start("diptych-gateway", "g")
    telemetry.start_server_span("s/M").end(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
    telemetry.stop()
    [(_, span)] = collector.spans(at_least=1)
    attributes = {a.key: a.value.string_value for a in span.attributes}
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert attributes["error.type"] == "INVALID_PARAMETER"


@pytest.mark.parametrize("variables", [{}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_off_it_makes_nothing_and_passes_the_client_trace_on(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    if variables:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    telemetry = Telemetry.start("diptych-gateway", "g")
    assert not telemetry.enabled
    server = telemetry.start_server_span("s/M", (CLIENT, ""))
    assert server.headers == server.child_headers("chat") == (CLIENT, "")
    assert server.trace_id == TRACE_ID.hex()
    telemetry.emit_phases(server.headers, [PhaseSpan("chat", 1.0, 2.0)])
    server.end()
    telemetry.stop()


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        (("\udcff", ""), ("", "")),  # a byte of an HTTP header that is no UTF-8: no protobuf can carry it
        (("x" * 1000, ""), ("", "")),
        (("", "a=1"), ("", "")),
        ((CLIENT, "a=\udcff"), (CLIENT, "")),
        ((CLIENT, ",".join(f"k{i}=1" for i in range(33))), (CLIENT, "")),
        ((CLIENT, "a=1,b=2"), (CLIENT, "a=1,b=2")),
    ],
)
def test_off_it_passes_nothing_malformed_on_and_logs_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sent: tuple[str, str],
    passed_on: tuple[str, str],
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert Telemetry.start("diptych-gateway", "g").start_server_span("s/M", sent).headers == passed_on
    assert not caplog.records


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json", "carrier pigeon"])
def test_a_protocol_without_an_exporter_is_said_and_not_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert not Telemetry.start("diptych-gateway", "g").enabled
    assert f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}" in caplog.text


def services_sent(
    monkeypatch: pytest.MonkeyPatch, collector: OtlpCollector, variables: dict[str, str]
) -> list[str]:
    """Whose span the collector gets, from a gateway with these variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    telemetry = Telemetry.start("diptych-gateway", "g")
    telemetry.emit_phases(None, [PhaseSpan("chat", 1.0, 2.0)])
    telemetry.stop()
    return [service for service, _ in collector.spans(at_least=1)]


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_EXPORTER_OTLP_TIMEOUT": "", "OTEL_SERVICE_NAME": ""},
        {"OTEL_EXPORTER_OTLP_COMPRESSION": "none"},
        {"OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "none"},
    ],
)
def test_what_the_specification_lets_an_operator_write_is_as_if_it_were_absent(
    monkeypatch: pytest.MonkeyPatch, collector: OtlpCollector, variables: dict[str, str]
) -> None:
    assert services_sent(monkeypatch, collector, variables) == ["diptych-gateway"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
    ],
)
def test_a_value_that_cannot_be_read_costs_the_traces_and_not_the_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    assert not Telemetry.start("diptych-gateway", "g").enabled
    assert "no traces are sent: " in caplog.text


@pytest.mark.parametrize(
    ("variables", "service"),
    [
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours,team=a"}, "ours"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours", "OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=a"}, "diptych-gateway"),
    ],
)
def test_the_environment_names_the_service(
    monkeypatch: pytest.MonkeyPatch, collector: OtlpCollector, variables: dict[str, str], service: str
) -> None:
    assert services_sent(monkeypatch, collector, variables) == [service]


def test_no_compression_of_traces_stands_against_a_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
    telemetry = Telemetry.start("diptych-gateway", "g")
    assert telemetry.enabled
    assert "OTEL_EXPORTER_OTLP_COMPRESSION" not in os.environ, "the exporter would take that one"
    telemetry.stop()


def test_stop_is_bounded_when_the_collector_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    telemetry = Telemetry.start("diptych-gateway", "g")
    telemetry.emit_phases(None, [PhaseSpan("chat", 1.0, 2.0)])
    start = time.monotonic()
    telemetry.stop()
    assert time.monotonic() - start < 8.0  # the exporter's own patience is ten
