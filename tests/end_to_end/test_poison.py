"""A request under which two workers die gets no third, and is told so as soon as both are proven dead."""

from __future__ import annotations

import os
import signal
import time

import grpc
import pytest

from diptych.client import CallFailed, Client
from tests.end_to_end import reference
from tests.end_to_end.stack import running_stack

WAIT_S = 300.0  # longer than the test may take: it is the proof that ends the request, and not the time


@pytest.mark.full  # tests/gateway/session and the simulator have the rule
def test_the_supervisor_proves_two_deaths() -> None:
    with (
        running_stack("--kv-memory-mib=256", f"--set=gateway.worker-wait-timeout={WAIT_S}") as stack,
        Client(stack.address, retries=0) as client,
    ):
        stream = client.stream(reference.prompts()[10], max_tokens=4000, temperature=0.0, ignore_eos=True)
        next(stream)
        began = time.monotonic()
        first = stack.account["decode"][0]["pid"]
        os.kill(first, signal.SIGKILL)
        while stack.account["decode"][0].get("pid") in (None, first):
            next(stream)
            assert time.monotonic() - began < WAIT_S / 2
        for _ in range(40):  # what the first worker had computed may still be on its way
            next(stream)
        os.kill(stack.account["decode"][0]["pid"], signal.SIGKILL)
        with pytest.raises(CallFailed) as failed:
            for _ in stream:
                pass
        assert failed.value.code is grpc.StatusCode.INTERNAL
        assert time.monotonic() - began < WAIT_S / 2
        stack.wait_idle()
