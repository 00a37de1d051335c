"""`diptych rank`: the parent of a rank on this host, which starts it again when its group is over.

A group ends as one: rank 0 exits when a rank is lost, and every rank when rank 0 is. Rank 0's supervisor
starts that one again, and this process its rank, which joins the next group at the same address.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import typer

from diptych.cli.restart_policy import RestartPolicy
from diptych.runtime.host_port import parse_address
from diptych.runtime.python_module import module_command

MODULE = "diptych.worker_process.group.remote_rank_program"
_CANNOT_SERVE = 2
"""Exit status of a rank that another start would not help."""
_POLICY = RestartPolicy()


def run_ranks(rendezvous: str, key_file: Path, model: str, log_level: str) -> int:
    """Run a rank after the other until a signal; return the exit status."""
    try:
        parse_address(rendezvous)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="HOST:PORT") from None
    ranks = _Ranks([rendezvous, str(key_file), model, log_level])
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: ranks.stop())
    return ranks.run()


class _Ranks:
    """Ranks of this host, one at a time."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._death, self._alive = os.pipe()
        self._rank: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the rank, and start no other."""
        self._stopped.set()
        if self._rank is not None:
            self._rank.kill()

    def run(self) -> int:
        """Run ranks until `stop`; return the exit status, which is not 0 where no rank can serve."""
        failures = 0
        while not self._stopped.is_set():
            started = time.monotonic()
            command = [*module_command(MODULE), *self._arguments, str(self._death)]
            self._rank = subprocess.Popen(command, pass_fds=[self._death], stdin=subprocess.DEVNULL)
            if self._stopped.is_set():  # the signal came before there was a rank to end
                self._rank.kill()
            status = self._rank.wait()
            if self._stopped.is_set():
                break
            if status == _CANNOT_SERVE:
                return 1
            failures = _POLICY.failures(failures, time.monotonic() - started)
            delay = _POLICY.delay_s(failures)
            print(f"diptych rank: the rank ended: another one in {delay:.1f} s", file=sys.stderr)
            self._stopped.wait(delay)
        return 0
