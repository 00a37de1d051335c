"""Workers whose ranks are on several hosts, seen from outside: `diptych up`, and `diptych rank` beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.end_to_end.rank_processes import NO_LOCAL_PREFILL, Degrees, size_of
from tests.end_to_end.stack import Stack, running_stack

HERE = "127.0.0.1"


def free_port(host: str) -> int:
    """Return a port that is free at an address now."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def serving_across_hosts(
    model: Path,
    prefill: Degrees,
    decode: Degrees,
    folder: Path,
    *flags: str,
    remote: Mapping[str, int] | None = None,
    host: str = HERE,
    elsewhere: Sequence[str] = (),
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[Stack, list[int]]]:
    """Run a system whose workers have ranks with memories of their own; yield it and the pids of the parents
    of these ranks.

    Args:
        remote: number of such ranks by role; default: all but rank 0.
        host: address of the workers that the ranks reach.
        elsewhere: command that becomes `diptych rank`, such as `ip netns exec NAME`.
        prefix: command that becomes `diptych up`.
        env: more variables of all processes.
    """
    key = folder / "rank-key"
    key.write_text("a secret of ranks, for this test")
    chosen = ["--model", str(model), "--dtype", "fp32", "--prefill-chunk", "48", "--kv-blocks", "96"]
    started: list[subprocess.Popen[bytes]] = []
    for role, degrees in (("prefill", prefill), ("decode", decode)):
        count = size_of(degrees) - 1 if remote is None else remote[role]
        given: dict[str, object] = dict(degrees)
        if count:
            address = f"{host}:{free_port(HERE)}"
            given |= {"remote-ranks": count, "rendezvous": address, "rank-key-file": key}
            command = [*elsewhere, sys.executable, "-m", "diptych", "rank", address]
            command += ["--rank-key-file", str(key), "--model", str(model)]
            with (folder / f"ranks-{role}.log").open("ab") as log:
                started += [
                    subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
                    )
                    for _ in range(count)
                ]
        for flag, value in given.items():
            chosen += ["--set", f"{role}.{flag}={str(value).lower() if isinstance(value, bool) else value}"]
    given_env = {"DIPTYCH_WORKER_WAIT_TIMEOUT": "300", **(env or {})}
    try:
        with running_stack(*chosen, *flags, *NO_LOCAL_PREFILL, env=given_env, prefix=prefix) as stack:
            yield stack, [process.pid for process in started]
            stack.wait_idle(120)
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        statuses = [process.wait(30) for process in started]
    assert statuses == [0] * len(started)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def kill_rank(parent: int) -> None:
    """Kill the rank that a `diptych rank` has started."""
    for pid in children(parent):
        os.kill(pid, signal.SIGKILL)
