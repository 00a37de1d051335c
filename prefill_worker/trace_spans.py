"""The spans of an attempt that is over, from the times that its request has kept."""

from __future__ import annotations

import time

from diptych.runtime.telemetry import AttributeValue, PhaseSpan
from diptych.worker_process.failure_names import failure_name
from prefill_worker.request import PrefillRequest, State


def attempt_span(request: PrefillRequest, outcome: str) -> PhaseSpan:
    """`prefill` with its phases queue, kv_alloc_wait, prefill and kv_transfer.send.

    A phase that never ran has no span. Failure lands on the phase that was active.
    """
    end = request.entered.get(State.ENDED) or time.monotonic()
    queued, asked = request.entered[State.QUEUED], request.entered.get(State.ASKED)
    granted, computed = request.entered.get(State.GRANTED), request.computed_at
    starts = [
        ("queue", queued),
        ("kv_alloc_wait", asked),
        ("prefill", granted),
        ("kv_transfer.send", computed),
    ]
    ran = [(name, start) for name, start in starts if start is not None]
    ends = [start for _, start in ran[1:]] + [end]
    phases = [PhaseSpan(name, start, stop) for (name, start), stop in zip(ran, ends, strict=True)]
    if outcome == "failed":
        last = phases[-1]
        error = outcome if request.failure is None else failure_name(request.failure.reason)
        phases[-1] = PhaseSpan(last.name, last.start_s, last.end_s, error=error)
    attributes: dict[str, AttributeValue] = {
        "diptych.attempt": request.key[1],
        "diptych.outcome": outcome,
        "diptych.prefill.tokens": len(request.token_ids),
        "diptych.prefill.cached_tokens": request.granted.computed_tokens
        if request.granted is not None
        else 0,
        "diptych.prefill.steps": request.steps,
    }
    return PhaseSpan(
        "prefill",
        queued,
        end,
        attributes=attributes,
        key=request.attempt.prefill_span,
        children=tuple(phases),
    )
