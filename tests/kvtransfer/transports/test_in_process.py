"""A writer in the same process: its gate, its fence, and the end of a process whose writer does not stop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

from kvtransfer.protocol.messages import WriterId
from kvtransfer.protocol.transfer_table import EscalationTimeouts
from kvtransfer.transports import registry, writer_gate
from kvtransfer.transports.base import Locality, ReceiverHooks, TransportError, Welcome, host_id
from kvtransfer.transports.in_process import InProcessReceiver, is_fenced, open_in_process, writing
from kvtransfer.transports.pool_memory import allocate_pool
from kvtransfer.transports.writer_gate import WriterFenced
from tests.kvtransfer.conftest import INCARNATION, LAYOUT, fill, until

WRITER = WriterId("w", 1)


class Ends:
    """A receiver, and what it reported."""

    def __init__(self) -> None:
        self.dead: list[WriterId] = []
        self.stuck = 0
        self.pool = allocate_pool(LAYOUT, 4)
        hooks = ReceiverHooks(
            self.dead.append, lambda *a: None, lambda *a: None, lambda *a: None, lambda *a: None
        )
        self.receiver = InProcessReceiver(self.pool, host_id(), hooks, self._on_stuck)

    def _on_stuck(self) -> None:
        self.stuck += 1

    async def register(self, writer: WriterId = WRITER):
        token = self.receiver.admit(writer, writer_gate.os.getpid())
        return await open_in_process(Welcome("a:1", self.receiver.endpoint, token, LAYOUT, 4))


@pytest.fixture
async def ends():
    made = Ends()
    await made.receiver.start()
    yield made
    await made.receiver.close()


class Step:
    """A step on a thread of its own, which ends when it is let."""

    def __init__(self, memory) -> None:
        self._inside, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(memory,))
        self._thread.start()
        self._inside.wait(10)

    def _run(self, memory) -> None:
        with writing([memory]):
            self._inside.set()
            self._end.wait(30)

    def end(self) -> None:
        self._end.set()
        self._thread.join()


async def test_memory_of_a_writer_is_the_pool_itself(ends):
    theirs = await ends.register()
    assert ends.receiver.registered(WRITER)
    assert theirs is not ends.pool.memory
    theirs.block_bytes(1)[:4] = b"abcd"
    assert bytes(ends.pool.memory.block_bytes(1)[:4]) == b"abcd"


async def test_unknown_token_gets_no_pool(ends):
    with pytest.raises(TransportError, match="unknown token"):
        await open_in_process(Welcome("a:1", ends.receiver.endpoint, b"x" * 32, LAYOUT, 4))
    with pytest.raises(TransportError, match="not in this process"):
        await open_in_process(Welcome("a:1", "in-process:other", b"x" * 32, LAYOUT, 4))


async def test_writer_of_another_process_is_refused(ends):
    pid = writer_gate.os.getpid()
    assert ends.receiver.unreachable_reason(Locality(host_id(), "", pid)) is None
    assert ends.receiver.unreachable_reason(Locality(host_id(), "", pid + 1)) == "in another process"
    assert ends.receiver.unreachable_reason(Locality("other", "", pid)) == "in another process"


async def test_fence_of_an_idle_writer_is_proven_at_once(ends):
    memory = await ends.register()
    ends.receiver.fence(WRITER)
    await until(lambda: ends.dead == [WRITER], 10)
    assert is_fenced(memory)
    assert not ends.receiver.registered(WRITER)
    with pytest.raises(WriterFenced), writing([memory]):
        raise AssertionError("a fenced writer wrote")


async def test_fence_waits_for_the_step_that_writes(ends):
    step = Step(await ends.register())
    ends.receiver.fence(WRITER)
    await asyncio.sleep(0.1)
    assert ends.dead == []
    step.end()
    await until(lambda: ends.dead == [WRITER], 10)
    assert ends.stuck == 0


async def test_fence_waits_for_a_step_in_an_earlier_memory_of_the_writer(ends):
    step = Step(await ends.register())
    await ends.register()
    ends.receiver.fence(WRITER)
    await asyncio.sleep(0.1)
    assert ends.dead == []
    step.end()
    await until(lambda: ends.dead == [WRITER], 10)


async def test_step_that_does_not_end_in_time_ends_the_process(ends, monkeypatch):
    monkeypatch.setattr(writer_gate, "FENCE_S", 0.05)
    step = Step(await ends.register())
    ends.receiver.fence(WRITER)
    await until(lambda: ends.stuck == 1, 10)
    assert ends.dead == []
    step.end()


@pytest.mark.parametrize(("admitted", "why"), [("before", "unknown token"), ("after", "was fenced")])
async def test_writer_that_registers_late_does_not_save_the_process_from_its_stuck_step(
    ends, monkeypatch, admitted, why
):
    """Register between fence and death, with the token of a welcome that came before or after the fence."""
    monkeypatch.setattr(writer_gate, "FENCE_S", 0.05)
    step = Step(await ends.register())
    token = ends.receiver.admit(WRITER, writer_gate.os.getpid())
    ends.receiver.fence(WRITER)
    if admitted == "after":
        token = ends.receiver.admit(WRITER, writer_gate.os.getpid())
    with pytest.raises(TransportError, match=why):
        await open_in_process(Welcome("a:1", ends.receiver.endpoint, token, LAYOUT, 4))
    await until(lambda: ends.stuck == 1, 10)
    step.end()


async def test_fenced_writer_registers_anew(ends):
    before = await ends.register()
    ends.receiver.fence(WRITER)
    await until(lambda: ends.dead == [WRITER], 10)
    after = await ends.register()
    assert is_fenced(before)
    assert not is_fenced(after)
    with writing([after]):
        pass


@pytest.mark.parametrize(
    ("flag", "device", "names"),
    [
        ("auto", "cpu", ("in_process", "shared_memory", "tcp")),
        ("tcp", "cpu", ("tcp",)),
        ("auto", "cuda", ("in_process", "cuda_shared", "cuda_ipc")),
        ("cuda_ipc", "cuda", ("in_process", "cuda_shared", "cuda_ipc")),
    ],
)
def test_transports_of_a_worker_that_is_not_alone_in_its_process(flag, device, names):
    assert registry.transports_for(flag, torch.device(device), hosted=True) == names
    assert "in_process" not in registry.transports_for(flag, torch.device(device))


@pytest.mark.parametrize("flag", ["tcp", "gloo"])
def test_copies_that_a_stream_orders_are_refused_on_a_gpu_with_two(flag):
    with pytest.raises(registry.UnusableTransport, match="take cuda_ipc"):
        registry.transports_for(flag, torch.device("cuda"), hosted=True)


def test_end_of_the_process_is_a_kill():
    code = "from kvtransfer.transports.writer_gate import end_process; end_process()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == -9


async def test_blocks_of_a_writer_that_does_not_answer_are_free_once_it_was_fenced(make_pair):
    """No Stopped comes: the gate is the proof, and the next request of the same writer is served."""
    pair = await make_pair("in_process", timeouts=EscalationTimeouts(stop_s=0.3))
    granted = await pair.grant("r", 10)
    fill(granted, 10, 1)
    step = Step(granted.memory)
    pair.decode.server.cancel(granted.key)
    await asyncio.sleep(1.0)
    assert not pair.decode.settled(), "blocks were freed while a step wrote to them"
    step.end()
    await until(pair.decode.settled, 10)
    assert pair.decode.server.stats().fenced == 1

    async def linked() -> bool:
        try:
            return (await pair.prefill.client.peer(pair.decode.address, INCARNATION)).linked
        except Exception:
            return False

    for _ in range(400):
        if await linked():
            break
        await asyncio.sleep(0.05)
    again = await pair.grant("s", 10)
    with writing([again.memory]):
        fill(again, 10, 2)
    await (await pair.peer()).stop(again)
    await until(pair.decode.settled, 10)
