"""When a broken stream is asked for again, and where: the plan alone, on a clock of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc
import pytest

from diptych.client import CallFailed
from diptych.client.completion import Received, read_chunk
from diptych.client.resumption import MAX_FRUITLESS, Resumption
from diptych.v1 import inference_pb2 as pb

Code = grpc.StatusCode


def plan_of(
    received: Received | None = None,
    *,
    servers: int,
    timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Resumption:
    return Resumption(
        pb.GenerateRequest(),
        received or Received(),
        servers=servers,
        retries=3,
        timeout_s=timeout_s,
        clock=clock,
    )


def test_resumption_gives_up_without_progress_or_time() -> None:
    failure = CallFailed(Code.UNAVAILABLE, "away")
    plan = plan_of(servers=2)
    waits = [plan.wait_s(failure) for _ in range(MAX_FRUITLESS - 1)]
    assert waits[:4] == [0.0, 0.1, 0.2, 0.4]
    with pytest.raises(CallFailed):
        plan.wait_s(failure)
    now = [0.0]
    plan = plan_of(servers=1, timeout_s=1.0, clock=lambda: now[0])
    now[0] = 0.95
    with pytest.raises(CallFailed):
        plan.wait_s(failure)


def test_a_hint_is_of_the_server_that_gave_it() -> None:
    now = [0.0]
    full = CallFailed(Code.RESOURCE_EXHAUSTED, "full", retry_after_s=3.0)
    plan = plan_of(servers=2, clock=lambda: now[0])
    assert (plan.wait_s(full), plan.server) == (0.0, 1)  # the other one may have room
    now[0] = 0.5
    assert (plan.wait_s(CallFailed(Code.UNAVAILABLE, "away")), plan.server) == (2.5, 0)


def test_a_hint_beyond_the_deadline_is_not_waited_for() -> None:
    plan = plan_of(servers=1, timeout_s=2.0)
    with pytest.raises(CallFailed, match="full"):
        plan.wait_s(CallFailed(Code.RESOURCE_EXHAUSTED, "full", retry_after_s=3.0))


def test_a_stream_that_gave_no_token_is_not_gone_on_with() -> None:
    received = Received()
    received.add(read_chunk(pb.GenerateResponse(outputs=[pb.OutputDelta(token_ids=[1])])))
    plan = plan_of(received, servers=2)
    with pytest.raises(CallFailed):
        plan.wait_s(CallFailed(Code.ABORTED, "it broke"))
