"""Signals that end `diptych up`, in a process of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SIGNALLED = """
import asyncio, os, signal, sys
from diptych.cli.up import Stopped, run_until_signal

async def main() -> int:
    os.kill(os.getpid(), int(sys.argv[1]))
    await asyncio.sleep(0.2)
    return 7

try:
    status = run_until_signal(main())
except Stopped as stopped:
    status = stopped.status
sys.exit(status)
"""


def status_after(signum: signal.Signals, *, ignored: bool) -> int:
    trap = f"trap '' {signum.name.removeprefix('SIG')}; " if ignored else ""
    command = ["sh", "-c", f'{trap}exec "$0" -c "$1" "$2"', sys.executable, SIGNALLED, str(int(signum))]
    before = signal.signal(signum, signal.SIG_DFL)  # a suite under nohup hands an ignored one down
    try:
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    finally:
        signal.signal(signum, before)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_a_shells_status(signum: signal.Signals) -> None:
    assert status_after(signum, ignored=False) == 128 + signum


def test_an_ignored_sighup_changes_nothing() -> None:
    """Start the command as nohup does."""
    assert status_after(signal.SIGHUP, ignored=True) == 7
