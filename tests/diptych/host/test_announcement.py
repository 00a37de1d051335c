"""The line by which a hosting process announces both its workers."""

from __future__ import annotations

import asyncio
import json
import os
import time

import uvloop

from diptych.host.announcement import WorkerPipe, announce_both
from diptych.runtime.process import write_ready_line


def test_line_of_both_workers_follows_when_each_has_announced() -> None:
    read, write = os.pipe()

    async def announce() -> None:
        pipes = [WorkerPipe("prefill"), WorkerPipe("decode")]
        announcing = asyncio.create_task(announce_both(pipes, write))
        write_ready_line(pipes[1].ready_fd, {"grpc_port": 2})
        await asyncio.sleep(0.05)
        assert not announcing.done()
        write_ready_line(pipes[0].ready_fd, {"grpc_port": 1, "record": "{}"})
        await announcing

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(announce())
    with os.fdopen(read) as pipe:
        assert json.loads(pipe.read()) == {
            "prefill.grpc_port": 1, "prefill.record": "{}", "decode.grpc_port": 2
        }  # fmt: skip


def test_worker_that_announces_nothing_does_not_hold_up_the_end_of_the_process() -> None:
    async def give_up() -> None:
        announcing = asyncio.create_task(announce_both([WorkerPipe("prefill"), WorkerPipe("decode")], None))
        await asyncio.sleep(0.05)
        announcing.cancel()

    began = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(give_up())
    assert time.monotonic() - began < 30
