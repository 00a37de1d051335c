"""A small system to break, for commands as well as for tests, and what is to be seen of it from outside."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import urllib.error
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

import grpc

from diptych.v1 import admin_pb2 as pb
from diptych.v1 import admin_pb2_grpc
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import IDLE_GAUGES, Stack, StackFailed, running_stack, tail
from tests.faults.conftest import FLAGS, Breakable
from tests.faults.failpoints import Armory

T = TypeVar("T")
PAIRS = ("--prefill-workers", "2", "--decode-workers", "2")
SETTLED_WITHIN_S = 120.0  # a starved machine takes its time to start a worker again


@contextlib.contextmanager
def breakable_system(
    *flags: str, local_prefill: str = "never", write: Callable[[Path], object] = tiny_model.write
) -> Iterator[tuple[Breakable, Path]]:
    """A system over the tiny model, or the one that `write` makes in a folder; later flags win."""
    with tempfile.TemporaryDirectory(prefix="diptych-faults-") as folder:
        model, points = Path(folder, "model"), Path(folder, "failpoints")
        points.mkdir()
        model.mkdir()
        write(model)
        armory = Armory(points, local_prefill)
        env = {**armory.environment, "DIPTYCH_WORKER_WAIT_TIMEOUT": "100"}
        with running_stack("--model", str(model), *FLAGS, *flags, env=env) as stack:
            yield Breakable(stack, armory), model


def eventually(look: Callable[[], T], within_s: float, what: str) -> T:
    """What `look` sees once it is true."""
    until = time.monotonic() + within_s
    while not (seen := look()):
        if time.monotonic() > until:
            raise AssertionError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.02)
    return seen


def flush_prefixes(stack: Stack) -> None:
    """Forget what is cached, so that the next prompts are computed, and from nothing that may be wrong."""
    with grpc.insecure_channel(stack.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        stub.FlushPrefixCache(pb.FlushPrefixCacheRequest(), timeout=10)


def settle(stack: Stack) -> None:
    """Wait until whatever died is back and takes load, and nothing runs."""

    def ready() -> bool:
        account = stack.account
        workers_here = [*account["prefill"], *account["decode"], *account["encode"]]
        here = [*workers_here, account["valkey"]]
        if not all(one.get("pid") for one in here):
            return False
        with grpc.insecure_channel(stack.admin_address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            workers = stub.ListWorkers(pb.ListWorkersRequest(), timeout=10).workers
        ids = {one.get("worker_id") for one in workers_here}
        return {w.worker_id for w in workers if w.state == pb.WORKER_STATE_READY} == ids

    try:
        eventually(ready, SETTLED_WITHIN_S, "every worker is back")
    except AssertionError as error:
        raise StackFailed(f"{error}\n{tail(stack.log)}") from None
    stack.wait_idle(SETTLED_WITHIN_S)


def holding(stack: Stack, gone: Collection[int] = ()) -> dict[str, float]:
    """Which load gauges of the workers are not zero; one that is down, or is `gone`, holds nothing."""
    held = {}
    for role, names in IDLE_GAUGES.items():
        for index, worker in enumerate(stack.account[role]):
            if "http_port" not in worker or worker.get("pid") in (None, *gone):
                continue
            for name in names:
                with contextlib.suppress(urllib.error.URLError, OSError, IndexError, KeyError):
                    if value := stack.metric(role, name, index):
                        held[f"{role} {index} {name}"] = value
    return held


def alive(pids: list[int]) -> list[int]:
    """Those that are still there; a zombie is one that nobody has reaped."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def signal_if_alive(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
