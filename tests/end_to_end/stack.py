"""A whole running system for tests: `diptych up` in a process of its own, on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 60.0

REQUEST_GAUGES = ("diptych_requests_running", "diptych_requests_waiting")
BLOCK_GAUGES = ("diptych_kv_cache_utilization", "diptych_kv_cache_quarantined_blocks")
IDLE_GAUGES = {
    "prefill": REQUEST_GAUGES,
    "decode": REQUEST_GAUGES + BLOCK_GAUGES,
    "encode": REQUEST_GAUGES,
}


class StackFailed(AssertionError):
    """The system did not start or stop as it should; the message holds the end of its log."""


@dataclass
class Stack:
    """A running system."""

    process: subprocess.Popen[bytes]
    ready_file: Path
    log: Path

    @property
    def account(self) -> dict[str, Any]:
        """The ready file as it is now: ports and pids change when a worker is restarted."""
        loaded: dict[str, Any] = json.loads(self.ready_file.read_text())
        return loaded

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.account['gateway']['grpc_port']}"

    @property
    def admin_address(self) -> str:
        return f"127.0.0.1:{self.account['gateway']['admin_port']}"

    def pids(self) -> list[int]:
        account = self.account
        workers = [*account["prefill"], *account["decode"], *account["encode"]]
        processes = [account["valkey"], account["gateway"], *workers]
        return [p["pid"] for p in processes if p and p.get("pid")]

    def metric(self, role: str, name: str, index: int = 0, label: str = "") -> float:
        """The sum of one metric of a process over its labels, or over those that have `label`."""
        process = self.account[role] if role == "gateway" else self.account[role][index]
        url = f"http://127.0.0.1:{process['http_port']}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        lines = [line for line in lines if line.split("{")[0].split(" ")[0] == name and label in line]
        values = [float(line.rsplit(" ", 1)[1]) for line in lines]
        if not values:
            raise KeyError(f"{role} has no metric {name}")
        return sum(values)

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no worker has a request and every KV block is back; fails if that does not come."""
        deadline = time.monotonic() + timeout_s
        while busy := self._busy():
            if time.monotonic() > deadline:
                raise StackFailed(f"not idle after {timeout_s} s: {busy}\n{tail(self.log)}")
            time.sleep(0.05)

    def _busy(self) -> dict[str, float]:
        """Which load gauges are not zero; a worker that is being restarted counts as busy."""
        busy = {}
        for role, names in IDLE_GAUGES.items():
            for index, worker in enumerate(self.account[role]):
                if "http_port" not in worker:
                    busy[f"{role} {index} is down"] = 1.0
                    continue
                try:
                    values = {name: self.metric(role, name, index) for name in names}
                except OSError:  # it died a moment ago, and nobody has noted it yet
                    values = {"does not answer": 1.0}
                busy |= {f"{role} {index} {name}": value for name, value in values.items() if value}
        return busy


@contextlib.contextmanager
def running_stack(
    *flags: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, prefix: Sequence[str] = ()
) -> Iterator[Stack]:
    """`diptych up` with free ports and these flags; stopped with SIGTERM, and nothing may be left then.

    Args:
        prefix: command that becomes `diptych up`, such as `ip netns exec NAME`.
    """
    with tempfile.TemporaryDirectory(prefix="diptych-test-") as folder:
        ready, log = Path(folder, "ready.json"), Path(folder, "log.txt")
        command = [*prefix, sys.executable, "-m", "diptych", "up", "--ready-file", str(ready)]
        command += ["--grpc-port", "0", "--http-port", "0", *flags]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, env={**os.environ, **(env or {})}, cwd=cwd, stdout=sink, stderr=subprocess.STDOUT
            )
        stack = Stack(process, ready, log)
        try:
            _wait_ready(stack)
            yield stack
        finally:
            pids = stack.pids() if ready.exists() else []
            process.send_signal(signal.SIGTERM)
            try:
                status = process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise StackFailed(f"did not stop within {STOP_TIMEOUT_S} s\n{tail(log)}") from None
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if status != 0 or left:
            raise StackFailed(f"stopped with status {status}, processes left: {left}\n{tail(log)}")


def _wait_ready(stack: Stack) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not stack.ready_file.exists():
        if stack.process.poll() is not None or time.monotonic() > deadline:
            raise StackFailed(f"did not start: status {stack.process.poll()}\n{tail(stack.log)}")
        time.sleep(0.05)


def http_root(stack: Stack) -> str:
    """Where the HTTP door is."""
    return f"http://127.0.0.1:{stack.account['gateway']['http_port']}"


def tail(log: Path, lines: int = 60) -> str:
    """The end of a log, for a failure's message."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
