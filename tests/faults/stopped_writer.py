"""A prefill worker that hangs with a grant out, and wakes up when its blocks are somebody else's.

    python -m tests.faults.stopped_writer [--times 5] [--output FILE]

It is stopped (SIGSTOP) between two chunks for 10 s, over memory that it maps and over TCP. Meanwhile its
requests go on elsewhere and others fill the pool. All answers must be right, before and after it wakes up,
and by then it has been fenced: killed where it maps the pool, refused by generation elsewhere.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.conftest import Breakable
from tests.faults.figures import Figure, Result, add_output, count, tell
from tests.faults.requests import ask, check_same
from tests.faults.system import PAIRS, breakable_system, flush_prefixes, settle, signal_if_alive

MIX = ("greedy", "seeded", "two choices", "penalties")
STOPPED_S = 10.0
TRANSPORTS = ("shared_memory", "tcp")


def stop_a_writer(system: Breakable, stopped_s: float) -> bool:
    """Whether the stopped process was killed; raises AssertionError for wrong answers."""
    expected = ask(system.address, MIX)
    system.stack.wait_idle(10)
    flush_prefixes(system.stack)
    system.armory.arm("prefill.chunk", "freeze", after=1)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, system.address, MIX)
        stopped = system.armory.wait_taken("prefill.chunk")
        wakes_at = time.monotonic() + stopped_s
        try:
            answers = asked.result()
            check_same(expected, answers)
            while time.monotonic() < wakes_at:
                flush_prefixes(system.stack)
                check_same(expected, ask(system.address, MIX))
        finally:
            killed = not _running(stopped)
            signal_if_alive(stopped, signal.SIGCONT)
    for _ in range(3):
        check_same(expected, ask(system.address, MIX))
    settle(system.stack)
    return killed


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def measure(times: int, stopped_s: float = STOPPED_S) -> Result:
    figures, failures = [], []
    for transport in TRANSPORTS:
        killed = wrong = 0
        with breakable_system(*PAIRS, "--transport", transport) as (system, _):
            for _ in range(times):
                try:
                    killed += stop_a_writer(system, stopped_s)
                except AssertionError as error:
                    wrong += 1
                    failures.append(f"{transport}: {str(error)[:300]}")
        what = f"over {transport}: "
        figures.append(Figure(f"{what}writers stopped with a grant out", str(times)))
        figures.append(count(f"{what}times that an answer was wrong", wrong, 0))
        if transport == "shared_memory":
            figures.append(count(f"{what}killed before it woke up", killed, times))
    return Result("Stopped writers", figures, failures=failures)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.stopped_writer", description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    add_output(parser)
    options = parser.parse_args(argv)
    return tell(measure(options.times), options.output)


if __name__ == "__main__":
    sys.exit(main())
