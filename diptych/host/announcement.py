"""The line by which a hosting process announces both its workers, from the line of each.

A worker writes its line to the pipe that its settings name (`diptych.runtime.process.announce_ready`). Here
each gets a pipe of its own; when both have written, one line goes to the parent: the members of each worker
behind its role, as `decode.grpc_port`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping

Announced = Mapping[str, int | str]


class WorkerPipe:
    """Pipe for the line of one worker."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._read, self.ready_fd = os.pipe()

    async def announced(self) -> Announced:
        """Return what the worker announces, with its role before each name; wait for it."""
        line = await asyncio.to_thread(self._line)
        return {f"{self.role}.{name}": value for name, value in json.loads(line).items()}

    def _line(self) -> str:
        with os.fdopen(self._read) as pipe:
            return pipe.readline()


async def announce_both(pipes: list[WorkerPipe], ready_fd: int | None) -> None:
    """Write one line to `ready_fd` when each pipe has one, and close it."""
    lines = [await pipe.announced() for pipe in pipes]
    if ready_fd is None:
        return
    both = {name: value for line in lines for name, value in line.items()}
    with contextlib.suppress(BrokenPipeError), os.fdopen(ready_fd, "w") as pipe:
        pipe.write(json.dumps(both) + "\n")
