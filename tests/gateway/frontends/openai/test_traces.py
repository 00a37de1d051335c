"""What an HTTP request looks like in a trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp
import openai
import pytest

from gateway.model.served_model import ServedModel
from tests.diptych.runtime.otlp_collector import OtlpCollector
from tests.gateway.frontends.openai.test_routes import gateway_api, ids_of, root
from tests.gateway.scripted_workers import answering

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    collector = OtlpCollector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    yield collector
    collector.stop()


async def test_the_trace_of_a_completion(
    bundled: ServedModel, redis_url: str, collector: OtlpCollector
) -> None:
    async with gateway_api(bundled, redis_url) as (stack, client, decode):
        await client.completions.create(model=bundled.card.name, prompt="secret", extra_headers=PARENT)
        (attach,) = await decode.wait_for("attach")
        await stack.until_idle()
    spans = {span.name: span for _, span in collector.spans(at_least=5)}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    server, operation = spans["POST /v1/completions"], spans[f"text_completion {bundled.card.name}"]
    assert server.parent_span_id.hex() == "b7ad6b7169203331"
    assert operation.parent_span_id == server.span_id
    assert attach.traceparent == f"00-{TRACE}-{operation.span_id.hex()}-01"
    attributes = {a.key: a.value for a in server.attributes}
    assert attributes["http.route"].string_value == "/v1/completions"
    assert attributes["url.scheme"].string_value == "http"
    assert attributes["http.response.status_code"].int_value == 200
    assert "rpc.system.name" not in attributes
    assert "secret" not in str(spans)


async def test_each_of_several_prompts_has_a_span(
    bundled: ServedModel, redis_url: str, collector: OtlpCollector
) -> None:
    async with gateway_api(bundled, redis_url) as (stack, client, _):
        await client.completions.create(model=bundled.card.name, prompt=["a", "b"], extra_headers=PARENT)
        await stack.until_idle()
    spans = [span for _, span in collector.spans(at_least=11)]
    (server,) = [span for span in spans if span.name == "POST /v1/completions"]
    parts = [span for span in spans if span.name == "completion of one prompt of several"]
    operations = [span for span in spans if span.name.startswith("text_completion")]
    assert [part.parent_span_id for part in parts] == [server.span_id] * 2
    # Who counts SERVER spans as incoming requests counts one.
    assert {span.span_id for span in spans if span.kind == span.SPAN_KIND_SERVER} == {server.span_id}
    assert {span.parent_span_id for span in operations} == {part.span_id for part in parts}


async def test_the_time_in_which_the_body_came_is_in_the_trace(
    bundled: ServedModel, redis_url: str, collector: OtlpCollector
) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        yield f'{{"model": "{bundled.card.name}", '.encode()
        await asyncio.sleep(0.3)
        yield b'"prompt": "x"}'

    sent = [
        *PARENT.items(),
        ("Content-Type", "application/json"),
        ("Tracestate", "a=1"),
        ("Tracestate", "b=2"),
    ]
    async with gateway_api(bundled, redis_url) as (stack, _, _), aiohttp.ClientSession() as session:
        async with session.post(f"{root(stack)}/v1/completions", data=slowly(), headers=sent) as answer:
            assert answer.status == 200
        await stack.until_idle()
    spans = {span.name: span for _, span in collector.spans(at_least=5)}
    server, operation = spans["POST /v1/completions"], spans[f"text_completion {bundled.card.name}"]
    assert server.end_time_unix_nano - server.start_time_unix_nano > 0.3e9
    assert operation.trace_state == server.trace_state == "a=1,b=2"
    # They begin together, but for the reading of two clocks.
    assert operation.start_time_unix_nano == pytest.approx(server.start_time_unix_nano, abs=1e7)


@pytest.mark.parametrize(
    ("headers", "status"), [({}, "CANCELLED"), ({"x-request-timeout-ms": "200"}, "DEADLINE_EXCEEDED")]
)
async def test_interrupted_streams_are_traced_as_such(
    bundled: ServedModel, redis_url: str, collector: OtlpCollector, headers: dict[str, str], status: str
) -> None:
    slow = answering(ids_of(bundled) * 50, pause_s=0.02)
    async with gateway_api(bundled, redis_url, slow) as (stack, client, decode):
        stream = await client.completions.create(
            model=bundled.card.name, prompt="x", max_tokens=400, stream=True, extra_headers=headers
        )
        if headers:
            with pytest.raises(openai.APIError, match="deadline"):
                _ = [chunk async for chunk in stream]
        else:
            await anext(aiter(stream))
            await stream.close()
        await decode.wait_for("cancel")
        await stack.until_idle()
    spans = {span.name: span for _, span in collector.spans(at_least=5)}
    server = {a.key: a.value for a in spans["POST /v1/completions"].attributes}
    assert server["error.type"].string_value == status
    operation = {a.key: a.value for a in spans[f"text_completion {bundled.card.name}"].attributes}
    assert operation["error.type"].string_value == status
