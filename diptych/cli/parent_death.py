"""Runs a foreign program that must not outlive its parent: `tether.py DEATH_FD PROGRAM [ARGUMENT …]`.

Our own programs tie themselves to their parent; one that we did not write cannot. PR_SET_PDEATHSIG
survives the exec that follows, and the pipe tells whether the parent was gone already before the call
(the kernel sends no signal for that). Started by path and isolated (`python -I`), so that it costs
20 ms and needs nothing but the standard library.
"""

import ctypes
import os
import select
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> NoReturn:
    """Replace this process by the program; exits with status 1 when the parent is gone."""
    death_fd, command = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"tether: prctl failed: {os.strerror(ctypes.get_errno())}")
    parent = select.poll()
    parent.register(death_fd, 0)  # only POLLHUP, which needs no asking: no writer is left
    if parent.poll(0):
        sys.exit(1)
    os.close(death_fd)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
