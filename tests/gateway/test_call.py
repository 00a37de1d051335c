"""Accounting around every call: authentication, metrics, spans and the exceptions it raises."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from prometheus_client import CollectorRegistry

from diptych.runtime.errors import DiptychError, Internal, QueueFull
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.metrics import new_registry
from diptych.runtime.telemetry import Attributes, Telemetry
from diptych.v1 import inference_pb2 as pb
from gateway.access.access import Access
from gateway.call import Call, Calls
from tests.diptych.runtime.otlp_collector import OtlpCollector

METHOD = "POST /v1/things"


class ScriptedCall(Call):
    """A protocol of its own; ``answers`` are the codes of ended calls."""

    def __init__(self, *, time_left_s: float | None = None) -> None:
        super().__init__(METHOD, received_at=100.0, header_request_id="theirs", time_left_s=time_left_s)
        self.answers: list[grpc.StatusCode] = []

    async def write(self, message: pb.GenerateResponse) -> None:
        raise NotImplementedError

    @property
    def span_attributes(self) -> Attributes:
        return {"http.request.method": "POST"}

    def ended(self, metrics: GatewayMetrics, code: grpc.StatusCode, duration_s: float) -> Attributes:
        self.answers.append(code)
        return {"http.response.status_code": 418}


def counting(now: float = 101.0, telemetry: Telemetry | None = None) -> tuple[Calls, CollectorRegistry]:
    registry = new_registry()
    telemetry = telemetry or Telemetry.start("diptych-gateway", "g")
    return Calls(telemetry, GatewayMetrics(registry), lambda: now, Access(None)), registry


@pytest.mark.parametrize(("left", "deadline"), [(None, None), (5.0, 105.0), (1e12, None)])
def test_call_deadline_counts_from_arrival_and_infinite_is_none(
    left: float | None, deadline: float | None
) -> None:
    call = ScriptedCall(time_left_s=left)
    assert call.deadline == deadline
    assert call.time_left_s(104.0) == (None if deadline is None else 1.0)
    assert call.time_left_s(200.0) == (None if deadline is None else 0.0)


def test_account_turns_a_bug_into_internal_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    calls, _ = counting()
    call = ScriptedCall()
    with pytest.raises(Internal) as caught, calls.account(call):
        raise ValueError("a secret")
    assert "secret" not in str(caught.value)
    assert "a secret" in caplog.text
    assert call.answers == [grpc.StatusCode.INTERNAL]


def test_account_counts_rejections_by_reason() -> None:
    calls, registry = counting()
    call = ScriptedCall()
    with pytest.raises(DiptychError), calls.account(call):
        raise QueueFull()
    assert registry.get_sample_value("diptych_rejections_total", {"reason": "QUEUE_FULL"}) == 1
    assert call.answers == [grpc.StatusCode.RESOURCE_EXHAUSTED]


@pytest.mark.parametrize(
    ("left", "code"),
    [
        (None, grpc.StatusCode.CANCELLED),
        (5.0, grpc.StatusCode.CANCELLED),
        (1.0, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_why_cancelled_tells_deadline_from_disconnect(left: float | None, code: grpc.StatusCode) -> None:
    calls, _ = counting(now=101.0)
    call = ScriptedCall(time_left_s=left)
    with pytest.raises(asyncio.CancelledError), calls.account(call):
        raise asyncio.CancelledError
    assert call.answers == [code]


def test_server_span_has_the_attributes_of_the_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = OtlpCollector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    telemetry = Telemetry.start("diptych-gateway", "g")
    calls, _ = counting(telemetry=telemetry)
    with pytest.raises(QueueFull), calls.account(ScriptedCall()):
        raise QueueFull()
    telemetry.stop()
    ((_, span),) = collector.spans(at_least=1)
    collector.stop()
    assert span.name == METHOD
    found = {a.key: a.value.int_value or a.value.string_value for a in span.attributes}
    assert found == {
        "http.request.method": "POST",
        "http.response.status_code": 418,
        "error.type": "QUEUE_FULL",
    }
