"""Drain: requests are handed back, and heartbeats tell a waiting worker from a stuck one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from decode_worker.config import DecodeSettings
from decode_worker.worker import DecodeWorker
from diptych.engine.runner import Runner
from diptych.engine.sampling import TokenLogprob
from diptych.runtime.process import ONE_SIGNAL_S
from diptych.runtime.role_change import EXIT_STATUS
from diptych.runtime.rpc_streams.connect import open_link
from diptych.runtime.rpc_streams.grpc_stream import GrpcCall
from diptych.runtime.rpc_streams.method import DECODE
from diptych.runtime.rpc_streams.unix_stream import UnixStream
from diptych.runtime.telemetry import Telemetry
from diptych.worker.v1 import decode_pb2, work_pb2
from diptych.worker_process.gateway_link import DrainOrder
from diptych.worker_process.loaded_engine import LoadedEngine
from tests.diptych.worker_process.both_workers import greedy, house, layout, model
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until

Request = decode_pb2.DecodeServiceLinkRequest
ROOT = Path(__file__).parents[3]
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


async def test_handed_back_requests_continue_on_another_worker():
    async with house("shared_memory", decodes=2, blocks=64) as made:
        first, second = made.decodes
        gateway = Gateway(made)
        heard = gateway.start(first, made.prefills[0], work(("r", 1), PROMPT, 200))
        await until(lambda: len(heard.tokens) > 5)
        first.loop.draining = True
        first.loop.hand_back()
        await heard.ended.wait()
        assert heard.terminal_messages == ["decode FAILURE_REASON_DRAINING"]
        delivered = tuple(heard.tokens)
        message = work(("r", 2), PROMPT, len(delivered) + 5, delivered=delivered)
        again = gateway.start(second, made.prefills[0], message)
        await again.ended.wait()
        assert delivered + tuple(again.tokens) == greedy(PROMPT, len(delivered) + 5)
        assert await made.empty() == []
        await gateway.close()


async def test_a_draining_prefill_worker_hands_back_all_its_requests():
    async with house("tcp", blocks=14) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        kept = decode.pool.allocate(12)
        heard = [gateway.start(decode, made.prefills[0], work((f"r{n}", 1), PROMPT, 4)) for n in range(20)]
        await until(lambda: decode.handoff.stats().waiting_asks > 0)
        made.prefills[0].loop.hand_back()
        for one in heard:
            await one.ended.wait()
        assert made.prefills[0].leftovers() == []
        words = {word for one in heard for word in one.terminal_messages}
        assert "prefill FAILURE_REASON_DRAINING" in words
        decode.pool.release(kept)
        await gateway.close()
        assert await made.empty() == []


async def test_hand_back_takes_a_waiting_ask_back():
    async with house("shared_memory", blocks=14) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        kept = decode.pool.allocate(14)
        gateway.start(decode, made.prefills[0], work(("r", 1), PROMPT, 4))
        await until(lambda: decode.handoff.stats().waiting_asks == 1)
        decode.loop.requests.cancel(("r", 1))
        assert decode.handoff.stats().waiting_asks == 0
        decode.pool.release(kept)
        await gateway.close()
        assert await made.empty() == []


async def test_a_worker_that_waits_for_blocks_is_not_busy():
    """A gateway takes a busy worker without progress for stuck, and gives up all its requests."""
    async with house("shared_memory", blocks=64) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        heard = gateway.start(decode, made.prefills[0], work(("r", 1), PROMPT, 200))
        await until(lambda: len(heard.tokens) > 0)
        taken = decode.pool.allocate(decode.pool.available() - 1)
        decode.pool.quarantine(taken)  # a writer does not answer
        await until(lambda: decode.loop.num_running == 1 and decode.pool.available() == 0)
        for _ in range(20):
            await asyncio.sleep(0.01)
        steps = decode.loop.steps
        assert not decode.loop.busy
        decode.pool.release_quarantined(taken)
        await heard.ended.wait()
        assert decode.loop.steps > steps
        assert heard.tokens == list(greedy(PROMPT, 200))
        await gateway.close()


@asynccontextmanager
async def leaving(
    carrier: type = UnixStream, *flags: str
) -> AsyncIterator[tuple[DecodeWorker, Any, asyncio.Event, Any]]:
    """A decode worker that runs and has an attempt, a gateway's stream into it, its signal, and its run."""
    engine = LoadedEngine(model(), Runner(model(), 1), layout(), "tiny", "fp32")
    reading, writing = os.pipe()
    settings = DecodeSettings.from_argv(
        [
            "--kv-blocks=16",
            "--worker-shutdown-timeout=0.2",
            "--redis-url=redis://127.0.0.1:1/0",
            f"--ready-fd={writing}",
            *flags,
        ]
    )
    worker, stop = DecodeWorker(settings, engine, Telemetry.start("t", "w")), asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    with open(reading) as ready:  # noqa: ASYNC230 - a pipe, read in a thread
        port = json.loads(await asyncio.to_thread(ready.readline))["grpc_port"]
    address = f"127.0.0.1:{port}"
    stream = GrpcCall(address, DECODE) if carrier is GrpcCall else await open_link(address, DECODE)
    assert isinstance(stream, carrier)
    await stream.write(Request(hello=work_pb2.GatewayHello(gateway_id="g")))
    await stream.write(Request(attach=work(("r", 1), PROMPT, 4)))
    await until(lambda: worker._loop.num_waiting == 1)
    yield worker, stream, stop, running
    await stream.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def told(stream: Any) -> list[work_pb2.FailureReason]:
    """Return the reasons with which its attempts end."""
    ended = []
    while not ended and (message := await stream.read()) is not None:
        ended += message.step.ended
    return [one.failure.reason for one in ended]


@pytest.mark.parametrize("carrier", [GrpcCall, UnixStream])
async def test_sigterm_hands_back_requests_that_do_not_finish(carrier):
    async with leaving(carrier) as (_, stream, stop, running):
        stop.set()
        assert await told(stream) == [work_pb2.FAILURE_REASON_DRAINING]
        assert await running == 0


async def test_sigterm_shortens_the_grace_of_a_drain():
    async with leaving() as (worker, stream, stop, running):
        await stream.write(Request(drain=work_pb2.Drain(grace=Duration(seconds=600))))
        await until(lambda: worker._loop.draining)
        await asyncio.sleep(0.3)
        assert worker._loop.num_waiting == 1
        stop.set()
        async with asyncio.timeout(10):
            assert await told(stream) == [work_pb2.FAILURE_REASON_DRAINING]
            assert await running == 0


async def test_drain_waits_until_large_outputs_are_written():
    """Their requests are over when the search is; a gateway that gets half of one has it searched again."""
    score = TokenLogprob(-1.0, 1, tuple((token, -1.0) for token in range(20)))
    async with leaving() as (worker, stream, _, running):
        await stream.write(Request(cancel=work_pb2.Cancel(id=work(("r", 1), PROMPT, 4).id)))
        await until(lambda: worker._loop.num_waiting == 0)
        (gateway,) = worker._gateways.streams
        over = SimpleNamespace(key=("search", 1), times_now=work_pb2.PhaseTimes)
        for rank in range(16):
            gateway.output(
                over.key, rank, range(4096), [score] * 4096, work_pb2.FINISH_REASON_LENGTH, over.times_now()
            )
        worker._server.drain(DrainOrder(60))
        whole = 0
        while whole < 16:
            message = await stream.read()
            whole += len(message.step.ended)
            if message.WhichOneof("message") == "heartbeat":
                await stream.write(Request(heartbeat=work_pb2.Heartbeat()))
        assert await running == 0


@pytest.mark.parametrize(
    ("become", "flags", "signalled", "status"),
    [
        (work_pb2.WORKER_ROLE_PREFILL, ["--role-changes=cpu"], False, EXIT_STATUS["prefill"]),
        (work_pb2.WORKER_ROLE_DECODE, ["--role-changes=any"], False, 0),
        (work_pb2.WORKER_ROLE_PREFILL, ["--role-changes=cpu"], True, 0),
    ],
    ids=["other-role", "own-role", "stopped-meanwhile"],
)
async def test_drain_for_a_role_ends_with_its_status(become, flags, signalled, status):
    async with leaving(UnixStream, *flags) as (worker, stream, stop, running):
        await stream.write(Request(drain=work_pb2.Drain(become=become)))
        await until(lambda: worker._loop.draining)
        if signalled:
            stop.set()
        assert await told(stream) == [work_pb2.FAILURE_REASON_DRAINING]
        assert await running == status


async def test_worker_without_a_supervisor_passes_a_change_of_its_role_over():
    async with leaving() as (worker, stream, stop, running):
        await stream.write(Request(drain=work_pb2.Drain(become=work_pb2.WORKER_ROLE_PREFILL)))
        await stream.write(Request(flush=work_pb2.FlushPrefixCache(id=7)))
        while (message := await stream.read()) is not None and not message.HasField("flushed"):
            assert not message.heartbeat.load.draining
        assert not worker._loop.draining
        assert worker._server._record("h:1").roles == ""
        stop.set()
        assert await told(stream) == [work_pb2.FAILURE_REASON_DRAINING]
        assert await running == 0


@pytest.mark.parametrize("broken", ["_schedule", "tick"])
async def test_drain_ends_when_the_engine_loop_dies(broken, monkeypatch, caplog):
    async with leaving() as (worker, stream, _, running):
        await stream.write(Request(drain=work_pb2.Drain(grace=Duration(seconds=600))))
        await until(lambda: worker._loop.draining)

        def breaks(*_: object) -> None:
            raise RuntimeError("the books do not balance")

        monkeypatch.setattr(worker._loop, broken, breaks)
        worker._loop._wake.set()
        async with asyncio.timeout(10):
            assert await running == 1
        assert "the books do not balance" in caplog.text


@pytest.mark.parametrize("again", [False, True])
def test_a_stuck_step_does_not_keep_the_process(again):
    """At a second signal it goes at once, and after a while without one."""
    command = [
        *(sys.executable, "-m", "tests.diptych.worker_process.stuck_worker", "600" if again else "0.5"),
        *("--kv-blocks=16", "--worker-shutdown-timeout=0.1", "--redis-url=redis://127.0.0.1:1/0"),
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            _up_to(process, "ready ")
            process.send_signal(signal.SIGTERM)
            _up_to(process, "closing")
            if again:
                time.sleep(2 * ONE_SIGNAL_S)
                process.send_signal(signal.SIGTERM)
            assert process.wait(20) == (128 + signal.SIGTERM if again else 1)
            assert process.stderr is not None
            assert ("second SIGTERM" if again else "does not end") in process.stderr.read()
        finally:
            process.kill()


def _up_to(process: subprocess.Popen[str], words: str) -> None:
    """Read the log until these lines."""
    seen = ""
    for line in process.stderr or ():
        seen += line
        if words in line:
            return
    raise AssertionError(seen)
