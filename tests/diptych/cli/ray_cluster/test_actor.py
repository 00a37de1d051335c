"""Actor of a program without Ray: a real worker process, started, killed, started again, ended."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from pathlib import Path

from diptych.cli.ray_cluster.actor import ProgramActor, ProgramStart, Report
from diptych.cli.stack import SharedSecrets
from diptych.cli.stack_options import StackOptions
from tests.diptych.cli.specs import alive

SHARED = SharedSecrets("redis://127.0.0.1:1/0", "ab" * 16)


def start(name: str, **changes: object) -> ProgramStart:
    options = StackOptions(prefill_threads=1, decode_threads=1, **changes)  # type: ignore[arg-type]
    return ProgramStart(name, options, SHARED, True, {"DIPTYCH_LOG_LEVEL": "error"})


async def until_pid(actor: ProgramActor, other_than: int | None) -> Report:
    seen = -1
    async with asyncio.timeout(120):
        while True:
            report = await actor.report(seen)
            seen = report.number
            one = report.running
            if one is not None and one.announced is not None and one.pid != other_than:
                return report


async def test_actor_restarts_its_program_and_ends_it() -> None:
    given: ProgramStart = pickle.loads(pickle.dumps(start("gateway")))
    actor = ProgramActor(given, "10.0.0.7")
    assert repr(actor) == "gateway"
    first = await until_pid(actor, None)
    assert first.running is not None
    assert first.running.pid is not None
    assert first.host == "127.0.0.1"
    os.kill(first.running.pid, signal.SIGKILL)
    second = await until_pid(actor, first.running.pid)
    assert second.running is not None
    assert second.running.restarts == 1
    await actor.stop()
    assert second.running.pid is not None
    assert not alive(second.running.pid)


async def test_a_program_that_cannot_start_says_why() -> None:
    actor = ProgramActor(start("decode-0", model=str(Path("/nowhere"))), "10.0.0.7")
    async with asyncio.timeout(120):
        report = await actor.report(0)
        while not report.failure:
            report = await actor.report(report.number)
    assert any("/nowhere" in line for line in report.last_lines)
    await actor.stop()


def test_workers_listen_on_their_node_where_there_are_several() -> None:
    options = StackOptions(insecure=True, host="0.0.0.0")
    one = ProgramStart("decode-0", options, SHARED, False, {})
    argv = one.spec("10.0.0.7").argv
    assert argv[argv.index("--host") + 1] == "10.0.0.7"
    assert "--insecure" in argv
    assert one.host("10.0.0.7") == "10.0.0.7"
    gateway = ProgramStart("gateway", options, SHARED, False, {"DIPTYCH_SECRET": "other"})
    assert gateway.host("10.0.0.7") == "10.0.0.7"
    assert gateway.spec("10.0.0.7").env["DIPTYCH_SECRET"] == SHARED.block_secret
    assert "ab" * 16 not in repr(gateway)
