"""One request is one trace over three processes, and its spans say where its time went, however it ended."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from diptych.client import AsyncClient, Chunk, chat
from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc
from tests.diptych.runtime.otlp_collector import OtlpCollector
from tests.end_to_end.stack import Stack, http_root, running_stack

MODEL = "SmolLM2-135M-Instruct"
SERVER = "diptych.v1.InferenceService/StreamGenerate"
GATEWAY_PHASES = {"tokenize", "admission.wait", "route"}
PREFILL_PHASES = {"queue", "kv_alloc_wait", "prefill", "kv_transfer.send"}
DECODE_PHASES = {"kv_transfer.receive", "queue", "decode"}
SPANS = 2 + len(GATEWAY_PHASES) + 1 + len(PREFILL_PHASES) + 1 + len(DECODE_PHASES)
COVERED = 0.95

Span = tuple[str, trace_pb2.Span]


@dataclass
class Traced:
    """A running system and the collector of its spans."""

    stack: Stack
    collector: OtlpCollector

    def spans(self, trace_id: bytes, name: str, count: int = 1) -> list[Span]:
        """Those of one trace, once `count` of a name are there (a request's own spans end last)."""
        deadline = time.monotonic() + 20
        while True:
            found = [(service, span) for service, span in self.collector.spans() if span.trace_id == trace_id]
            if len([span for _, span in found if span.name == name]) >= count:
                return found
            assert time.monotonic() < deadline, [span.name for _, span in found]
            time.sleep(0.05)


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    collector = OtlpCollector()
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    try:
        with running_stack("--set", "gateway.local-prefill=never", env=env) as stack:
            yield Traced(stack, collector)
    finally:
        collector.stop()


def header(number: int) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """A trace id of the test's own, and the metadata that names it."""
    trace_id = number.to_bytes(16, "big")
    return trace_id, (("traceparent", f"00-{trace_id.hex()}-00000000000000ff-01"),)


@asynccontextmanager
async def stub(traced: Traced) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    async with grpc.aio.insecure_channel(traced.stack.address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def request(max_tokens: int, **fields: object) -> pb.GenerateRequest:
    stopping = pb.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(model=MODEL, text="Once upon a time", stopping=stopping, **fields)  # type: ignore[arg-type]


async def drained(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def ask(address: str) -> Chunk:
    async with (
        AsyncClient(address, model=MODEL) as client,
        aclosing(client.stream(chat("Say hello."), max_tokens=8, temperature=0.0)) as stream,
    ):
        return [chunk async for chunk in stream][-1]


def test_a_collector_receives_the_whole_tree_with_one_trace_id(traced: Traced) -> None:
    last = asyncio.run(ask(traced.stack.address))
    spans = traced.collector.spans(at_least=SPANS, timeout_s=20)
    assert len({span.trace_id for _, span in spans}) == 1
    by_id = {span.span_id: (service, span.name) for service, span in spans}
    children: dict[tuple[str, str] | None, set[str]] = {}
    for _, span in spans:
        children.setdefault(by_id.get(span.parent_span_id), set()).add(span.name)
    assert children[None] == {SERVER}
    (chat_span,) = children["diptych-gateway", SERVER]
    assert chat_span.startswith("chat ")
    assert children["diptych-gateway", chat_span] == GATEWAY_PHASES | {"prefill", "decode"}
    assert children["diptych-prefill", "prefill"] == PREFILL_PHASES
    top = next(
        s for service, s in spans if service == "diptych-decode" and by_id[s.parent_span_id][0] != service
    )
    assert children["diptych-decode", "decode"] == DECODE_PHASES
    assert [by_id[link.span_id] for link in top.links] == [("diptych-prefill", "prefill")]

    assert last.timings is not None
    times = last.timings
    told = times.queue + times.prefill + times.kv_transfer + times.decode_queue + times.decode
    assert 0 < times.time_to_first_token <= times.total
    assert 0 < told <= times.total


@pytest.mark.parametrize(("number", "choices"), [(11, 1), (12, 3)])
def test_phases_cover_a_request(traced: Traced, number: int, choices: int) -> None:
    trace_id, metadata = header(number)

    async def run() -> list[pb.GenerateResponse]:
        async with stub(traced) as service:
            wanted = request(48, sampling=pb.SamplingParams(n=choices))
            return [m async for m in service.StreamGenerate(wanted, metadata=metadata)]

    messages = asyncio.run(run())
    found = traced.spans(trace_id, "decode", 2)  # the worker's own, and the phase in it
    found = traced.spans(trace_id, SERVER)
    (server,) = [span for _, span in found if span.name == SERVER]
    parents = {span.parent_span_id for _, span in found}
    phases = [span for _, span in found if span.span_id not in parents]
    covered = covered_ns(server, phases) / (server.end_time_unix_nano - server.start_time_unix_nano)
    assert covered >= COVERED, sorted(
        (
            span.name,
            span.start_time_unix_nano - server.start_time_unix_nano,
            span.end_time_unix_nano - span.start_time_unix_nano,
        )
        for span in phases
    )
    times = messages[-1].timings
    parts = (times.queue, times.prefill, times.kv_transfer, times.decode_queue, times.decode)
    assert sum(part.ToNanoseconds() for part in parts) <= times.total.ToNanoseconds()


def covered_ns(whole: trace_pb2.Span, parts: list[trace_pb2.Span]) -> int:
    """How much of a span lies in the union of others."""
    covered, end = 0, whole.start_time_unix_nano
    for part in sorted(parts, key=lambda span: span.start_time_unix_nano):
        until = min(part.end_time_unix_nano, whole.end_time_unix_nano)
        covered += max(until - max(part.start_time_unix_nano, end), 0)
        end = max(end, until)
    return covered


@pytest.mark.parametrize(
    ("number", "code", "fails"), [(21, "CANCELLED", False), (22, "DEADLINE_EXCEEDED", True)]
)
def test_a_stream_that_ends_early_says_so_in_its_spans(
    traced: Traced, number: int, code: str, fails: bool
) -> None:
    trace_id, metadata = header(number)

    async def run() -> None:
        async with stub(traced) as service:
            timeout = 0.5 if code == "DEADLINE_EXCEEDED" else None
            wanted = request(4000, sampling=pb.SamplingParams(n=2))
            call = service.StreamGenerate(wanted, metadata=metadata, timeout=timeout)
            await call.read()
            if timeout is None:
                call.cancel()
            else:
                with pytest.raises(grpc.aio.AioRpcError):
                    await drained(call)

    asyncio.run(run())
    found = traced.spans(trace_id, SERVER)
    (server,) = [span for _, span in found if span.name == SERVER]
    attributes = {a.key: a.value.string_value for a in server.attributes}
    assert attributes["rpc.response.status_code"] == code
    assert attributes["error.type"] == code
    # By the conventions a client that goes is no fault of the server; a deadline is.
    assert (server.status.code == server.status.STATUS_CODE_ERROR) is fails
    (operation,) = [span for _, span in found if span.parent_span_id == server.span_id]
    assert {a.key: a.value.string_value for a in operation.attributes}["error.type"] == code
    assert operation.status.code == operation.status.STATUS_CODE_ERROR
    traced.stack.wait_idle()


@pytest.mark.parametrize(
    ("number", "path", "fields"),
    [
        (31, "chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        (32, "completions", {"prompt": "Once"}),
        (33, "completions", {"prompt": ["Once", "Upon"]}),
    ],
)
def test_spans_have_the_id_of_the_http_answer(
    traced: Traced, number: int, path: str, fields: dict[str, Any]
) -> None:
    trace_id, ((_, traceparent),) = header(number)
    asked = urllib.request.Request(
        f"{http_root(traced.stack)}/v1/{path}",
        json.dumps({"model": MODEL, "max_tokens": 2, **fields}).encode(),
        {"Content-Type": "application/json", "traceparent": traceparent},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer_id = json.load(answer)["id"]
    found = traced.spans(trace_id, f"POST /v1/{path}")
    ids = [
        attribute.value.string_value
        for _, span in found
        for attribute in span.attributes
        if attribute.key == "gen_ai.response.id"
    ]
    assert set(ids) == {answer_id}
    assert answer_id.startswith(("chatcmpl-", "cmpl-"))
    assert len(ids) == (2 if isinstance(fields.get("prompt"), list) else 1)
