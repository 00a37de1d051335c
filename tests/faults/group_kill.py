"""The supervisor is killed with its whole process group: what stays behind?

    python -m tests.faults.group_kill [--times 20] [--output FILE]

Each time a system of four workers over shared memory gets SIGKILL while it streams. After 2 s nothing of it
may be left: no process, no file or socket in its temporary folder, no entry in /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from diptych.bench.cpu_time import family_of
from diptych.client import CallFailed, Client
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import START_TIMEOUT_S
from tests.faults.conftest import FLAGS
from tests.faults.figures import Figure, Result, add_output, count, tell
from tests.faults.system import PAIRS, alive, eventually

GONE_WITHIN_S = 2.0


def kill_group(model: Path) -> tuple[int, list[str]]:
    """How many processes there were, and what was left of them."""
    with tempfile.TemporaryDirectory(prefix="diptych-group-") as folder:
        ready, scratch = Path(folder, "ready.json"), Path(folder, "tmp")
        scratch.mkdir()
        before = _shared()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "diptych", "up", "--ready-file", str(ready)),
                *("--grpc-port", "0", "--http-port", "0", "--model", str(model), *FLAGS, *PAIRS),
            ],
            env={**os.environ, "TMPDIR": str(scratch)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        pids = [process.pid]
        try:
            eventually(ready.exists, START_TIMEOUT_S, "the system is ready")
            streaming = _stream(f"127.0.0.1:{json.loads(ready.read_text())['gateway']['grpc_port']}")
            pids = family_of(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        streaming.join(GONE_WITHIN_S)
        left = _left(pids[1:])
        left += [str(file) for file in scratch.rglob("*") if file.is_socket() or file.is_file()]
        left += [f"/dev/shm/{name}" for name in _shared() - before if _ours(name, pids)]
        return len(pids), left


def _stream(address: str) -> threading.Thread:
    """A stream that is on its way when this returns."""
    begun = threading.Event()

    def read() -> None:
        try:
            with Client(address, retries=0) as client:
                for _ in client.stream(tiny_model.prompt(3, 60), ignore_eos=True, timeout_s=30):
                    begun.set()
        except (CallFailed, grpc.RpcError):
            pass  # its server was killed

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30), "no token came"
    return thread


def _left(pids: list[int]) -> list[str]:
    until = time.monotonic() + GONE_WITHIN_S
    while (here := alive(pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return [f"process {pid}: {_command(pid)}" for pid in here]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    except OSError:
        return "gone since"


def _shared() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _ours(name: str, pids: list[int]) -> bool:
    """Other programs make entries too: ours are named after us or one of our processes."""
    return "diptych" in name or any(str(pid) in name for pid in pids)


def measure(times: int) -> Result:
    processes, failures = 0, []
    with tempfile.TemporaryDirectory(prefix="diptych-faults-") as folder:
        model = tiny_model.write(Path(folder))
        for turn in range(times):
            some, left = kill_group(model)
            processes += some
            failures += [f"kill {turn}: {one}" for one in left]
    figures = [
        Figure("groups killed", f"{times}, with {processes} processes"),
        count("processes, sockets, files and shared memory left after 2 s", len(failures), 0),
    ]
    return Result("Killed groups", figures, failures=failures)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.group_kill", description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    add_output(parser)
    options = parser.parse_args(argv)
    return tell(measure(options.times), options.output)


if __name__ == "__main__":
    sys.exit(main())
