"""The spans of an attempt that is over, from the times that its request has kept."""

from __future__ import annotations

import time

from decode_worker.request import DecodeRequest, State
from diptych.runtime.telemetry import AttributeValue, PhaseSpan
from diptych.worker_process.failure_names import failure_name


def attempt_span(request: DecodeRequest) -> PhaseSpan | None:
    """`decode` with its phases kv_transfer.receive, queue and decode; a phase that never ran has no span.

    None for an attempt that never got its blocks: its story is the prefill worker's. Failure lands on the
    phase that was active.
    """
    ready, running = request.entered.get(State.READY), request.entered.get(State.RUNNING)
    if ready is None:
        return None
    end = request.entered.get(State.ENDED) or time.monotonic()
    received = ready - request.times.kv_receive.ToNanoseconds() / 1e9
    phases = [PhaseSpan("kv_transfer.receive", received, ready), PhaseSpan("queue", ready, running or end)]
    if running is not None:
        phases.append(PhaseSpan("decode", running, end))
    if request.outcome == "failed":
        last = phases[-1]
        error = request.outcome if request.failed_for is None else failure_name(request.failed_for)
        phases[-1] = PhaseSpan(last.name, last.start_s, last.end_s, error=error)
    attributes: dict[str, AttributeValue] = {
        "diptych.attempt": request.key[1],
        "diptych.outcome": request.outcome,
        "diptych.decode.tokens": request.decoded,
        "diptych.kv_transfer.bytes": request.times.kv_bytes_transferred,
    }
    return PhaseSpan(
        "decode",
        received,
        end,
        attributes=attributes,
        key=request.attempt.decode_span,
        children=tuple(phases),
    )
