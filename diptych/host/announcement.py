"""The line by which a hosting process announces both its workers, from the line of each.

A worker writes its line to the pipe that its settings name (`diptych.runtime.process.announce_ready`). Here
each gets a pipe of its own; when both have written, one line goes to the parent: the members of each worker
behind its role, as `decode.grpc_port`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from diptych.runtime.process import read_ready_line, write_ready_line

Announced = Mapping[str, int | str]


class WorkerPipe:
    """Pipe for the line of one worker."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._read, self.ready_fd = os.pipe()

    async def announced(self) -> Announced:
        """Return what the worker announces, with its role before each name; wait for it."""
        line = await read_ready_line(self._read)
        return {f"{self.role}.{name}": value for name, value in json.loads(line).items()}


async def announce_both(pipes: list[WorkerPipe], ready_fd: int | None) -> None:
    """Write one line to `ready_fd` when each pipe has one, and close it."""
    lines = [await pipe.announced() for pipe in pipes]
    if ready_fd is not None:
        write_ready_line(ready_fd, {name: value for line in lines for name, value in line.items()})
