"""Two prefill and two decode workers: all take part, any pair can hand over, and one may be drained.

The text stays right, and an operator sees who is there. The decode workers are linked to over gRPC, as they
would be from other machines; the prefill workers, and all workers in other tests, within the host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from diptych.client import Client
from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from tests.end_to_end import reference
from tests.end_to_end.http_requests import many_greedy
from tests.end_to_end.stack import Stack, running_stack

MAX_TOKENS = 16
T = TypeVar("T")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    flags = ("--dtype", "fp32", "--prefill-workers", "2", "--decode-workers", "2", "--kv-memory-mib", "256")
    with running_stack(
        *flags, "--set", "gateway.local-prefill=never", "--set", "decode.links=grpc"
    ) as running:
        yield running


@pytest.fixture
def admin(stack: Stack) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    with grpc.insecure_channel(stack.admin_address) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def test_each_is_listed_with_its_load(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    # The system serves as soon as one pair does.
    _until(lambda: [w.state for w in _listed(admin)] == 4 * [pb.WORKER_STATE_READY])
    workers = _listed(admin)
    assert [w.role for w in workers] == 2 * [pb.WORKER_ROLE_PREFILL] + 2 * [pb.WORKER_ROLE_DECODE]
    assert all(w.load.total_blocks > 0 for w in workers if w.role == pb.WORKER_ROLE_DECODE)
    assert all(0 <= w.since_heartbeat.ToNanoseconds() < 60e9 for w in workers)


def test_links_stay_within_the_host_unless_told_otherwise(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    _until(lambda: [w.state for w in _listed(admin)] == 4 * [pb.WORKER_STATE_READY])
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    # The one that listens, and one for each link that was taken in.
    counts = {w.worker_id: sockets.count(f"@diptych-links-{w.address}") for w in _listed(admin)}
    assert all(counts[w.worker_id] == 0 for w in _decode(admin)), counts
    assert sorted(counts.values()) == [0, 0, 2, 2]


def test_they_share_the_load_and_agree(stack: Stack) -> None:
    prompts = [prompt for prompt in reference.short_prompts() if len(prompt) <= 260]
    answers = asyncio.run(many_greedy(stack.address, prompts, MAX_TOKENS, at_a_time=12))
    served = {
        (role, index): stack.metric(role, "diptych_engine_step_tokens_total", index)
        for role in ("prefill", "decode")
        for index in (0, 1)
    }
    stack.wait_idle()
    assert all(map(reference.is_greedy, prompts, answers, repeat(MAX_TOKENS)))
    assert all(served.values()), f"somebody had nothing to do: {served}"


@pytest.mark.full  # test_rolling_restart.py drains every worker of a smaller system
def test_a_drained_worker_ends_what_it_has_and_comes_back_as_another(
    admin: admin_pb2_grpc.AdminServiceStub, stack: Stack
) -> None:
    before = {w.worker_id: w for w in _decode(admin)}
    with Client(stack.address) as client:
        stream = client.stream("Count to a hundred:", max_tokens=60, ignore_eos=True)
        pieces = [next(stream)]
        busy = _until(lambda: [w for w in _decode(admin) if w.load.running])[0]
        admin.DrainWorker(pb.DrainWorkerRequest(worker_id=busy.worker_id))
        pieces += stream  # what runs is finished, by that worker or by another one
        assert sum(len(piece.token_ids) for piece in pieces) == 60
        after = _until(lambda: [w for w in _decode(admin) if w.worker_id not in before])
        assert after[0].state in (pb.WORKER_STATE_READY, pb.WORKER_STATE_CONNECTING)
        _until(lambda: len([w for w in _decode(admin) if w.state == pb.WORKER_STATE_READY]) == 2)
        assert client.generate("Again:", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4


def _listed(admin: admin_pb2_grpc.AdminServiceStub) -> list[pb.WorkerInfo]:
    return list(admin.ListWorkers(pb.ListWorkersRequest()).workers)


def _decode(admin: admin_pb2_grpc.AdminServiceStub) -> list[pb.WorkerInfo]:
    return [w for w in _listed(admin) if w.role == pb.WORKER_ROLE_DECODE]


def _until(look: Callable[[], T], timeout_s: float = 60.0) -> T:
    """What `look` sees once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (seen := look()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return seen
