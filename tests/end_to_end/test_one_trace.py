"""One request is one trace over three processes, and its Timings tell the same story."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from diptych.client import AsyncClient, Chunk, chat
from tests.end_to_end.stack import running_stack
from tests.runtime.otlp_collector import OtlpCollector

SERVER = "diptych.v1.InferenceService/StreamGenerate"
GATEWAY_PHASES = {"tokenize", "admission.wait", "route"}
PREFILL_PHASES = {"queue", "grant.wait", "prefill", "kv_transfer.send"}
DECODE_PHASES = {"kv_transfer.receive", "queue", "decode"}
SPANS = 2 + len(GATEWAY_PHASES) + 1 + len(PREFILL_PHASES) + 1 + len(DECODE_PHASES)


async def ask(address: str) -> Chunk:
    async with (
        AsyncClient(address, model="SmolLM2-135M-Instruct") as client,
        aclosing(client.stream(chat("Say hello."), max_tokens=8, temperature=0.0)) as stream,
    ):
        return [chunk async for chunk in stream][-1]


def test_a_collector_receives_the_whole_tree_with_one_trace_id() -> None:
    collector = OtlpCollector()
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    try:
        with running_stack(env=env) as stack:
            last = asyncio.run(ask(stack.address))
            spans = collector.spans(at_least=SPANS, timeout_s=20)
    finally:
        collector.stop()
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
