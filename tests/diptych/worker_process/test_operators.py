"""An operator's messages over a gateway's link: drain, and flush the prefix cache."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from decode_worker.config import DecodeSettings
from decode_worker.worker import DecodeWorker, gateway_links
from diptych.engine.runner import Runner
from diptych.runtime.rpc import bind, make_channel, make_server
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.runtime.rpc_streams.method import DECODE
from diptych.runtime.rpc_streams.stream import LinkService
from diptych.runtime.telemetry import Telemetry
from diptych.worker.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, work_pb2
from diptych.worker_process.loaded_engine import LoadedEngine
from prefill_worker.config import PrefillSettings
from prefill_worker.worker import PrefillWorker
from tests.diptych.worker_process.both_workers import BLOCK, house, layout, model
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until

PROMPT = tuple(range(4 * BLOCK + 1))
HELLO = work_pb2.GatewayHello(gateway_id="g")


@asynccontextmanager
async def serving(
    make: Any, settings_of: Any, *flags: str
) -> AsyncIterator[tuple[Any, str, asyncio.Task[int]]]:
    """A whole worker with its edges: itself, its address, and the task that ends with its exit status."""
    engine = LoadedEngine(model(), Runner(model(), 1), layout(), "tiny", "fp32")
    reading, writing = os.pipe()
    settings = settings_of.from_argv(
        ["--worker-shutdown-timeout=60", "--redis-url=redis://127.0.0.1:1/0", f"--ready-fd={writing}", *flags]
    )
    worker, stop = make(settings, engine, Telemetry.start("t", "w")), asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    with open(reading) as ready:  # noqa: ASYNC230 - a pipe, read in a thread
        port = json.loads(await asyncio.to_thread(ready.readline))["grpc_port"]
    try:
        yield f"127.0.0.1:{port}", running
    finally:
        stop.set()
        await running


async def test_a_drain_message_drains_a_decode_worker():
    async with (
        serving(DecodeWorker, DecodeSettings, "--kv-blocks=16") as (address, running),
        make_channel(address) as channel,
    ):
        call = decode_pb2_grpc.DecodeServiceStub(channel).Link()
        Request = decode_pb2.DecodeServiceLinkRequest
        await call.write(Request(hello=HELLO))
        await call.write(Request(attach=work(("running", 1), PROMPT, 4, choices=range(2))))
        started = time.monotonic()
        await call.write(Request(drain=work_pb2.Drain(grace=Duration(nanos=300_000_000))))
        await call.write(Request(attach=work(("late", 1), PROMPT, 4)))
        ended = []
        async for message in call:
            ended += message.step.ended
            if len(ended) == 3:
                break
        assert time.monotonic() - started >= 0.15  # half of the grace is theirs, the rest is for moving them
        assert [(one.id.request_id, one.choice) for one in ended] == [
            ("late", 0),
            ("running", 0),
            ("running", 1),
        ]
        assert {one.failure.reason for one in ended} == {work_pb2.FAILURE_REASON_DRAINING}
        async with asyncio.timeout(60):
            assert await running == 0


async def test_a_drain_message_drains_a_prefill_worker():
    async with (
        serving(PrefillWorker, PrefillSettings) as (address, running),
        make_channel(address) as channel,
    ):
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Link()
        Request = prefill_pb2.PrefillServiceLinkRequest
        await call.write(Request(hello=HELLO))
        await call.write(Request(drain=work_pb2.Drain(grace=Duration(nanos=100_000_000))))
        await call.write(Request(dispatch=prefill_pb2.Dispatch(work=work(("late", 1), PROMPT, 4))))
        async for message in call:
            if message.WhichOneof("message") == "ended":
                assert message.ended.failure.reason == work_pb2.FAILURE_REASON_DRAINING
                break
        async with asyncio.timeout(60):
            assert await running == 0


@pytest.mark.parametrize("held", [False, True])
async def test_a_flush_forgets_every_prefix_and_reports_their_number(held):
    async with house("shared_memory", blocks=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = gateway.start(decode, prefill, work(("r", 1), PROMPT, 200 if held else 3))
        await (until(lambda: len(heard.tokens) > 2) if held else heard.ended.wait())
        links = gateway_links(decode.loop, work_pb2.WorkerHello(worker_id="w"), lambda grace_s: None)
        server = make_server(internal=True)
        add_links(server, [LinkService(DECODE, links.serve)])
        port = bind(server, "127.0.0.1", 0, False)
        await server.start()
        cached = decode.pool.cached()
        async with make_channel(f"127.0.0.1:{port}") as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Link()
            Request = decode_pb2.DecodeServiceLinkRequest
            await call.write(Request(hello=HELLO))
            await call.write(Request(flush=work_pb2.FlushPrefixCache(id=7)))
            async for message in call:
                if message.WhichOneof("message") == "flushed":
                    break
        assert message.flushed.id == 7
        assert message.flushed.blocks >= cached >= len(PROMPT) // BLOCK
        await heard.ended.wait()
        again = gateway.start(decode, prefill, work(("again", 1), PROMPT, 3))
        await again.ended.wait()
        assert decode.ended[-1].times.cached_tokens == 0
        assert await made.empty() == []
        await gateway.close()
        await server.stop(None)
