"""The machine-readable account of a running system, for scripts and tests.

    {"pid": 1, "redis_url": "redis://…", "secret": "…", "valkey": {"pid": 2, "port": 6379},
     "gateway": {"name": "gateway", "pid": 3, "restarts": 0, "grpc_port": 50051, "http_port": 8000,
                 "admin_port": 50052, "worker_id": "…"},
     "prefill": [{…}], "decode": [{…}]}

A process that is down at the moment has no pid or no ports (null or absent). The file appears once the
system serves, is replaced in one step whenever a process ends or comes back, and goes at the end.
It holds the shared secrets: only its owner may read it.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.stack import SharedSecrets
from launcher.supervisor import Running


class ReadyFile:
    """Writes and removes the file at `path`, whose folder must exist."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._removed = False

    def write(self, shared: SharedSecrets, processes: Sequence[Running]) -> None:
        """Replaces the file as a whole: a reader sees the old or the new one, never half.

        Does nothing after `remove`: news of a process may still be on its way when everything stops.
        """
        if self._removed:
            return
        # mkstemp makes it readable by its owner alone.
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(account(shared, processes), file, indent=1)
            Path(name).replace(self._path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        self._removed = True
        self._path.unlink(missing_ok=True)


def account(shared: SharedSecrets, processes: Sequence[Running]) -> dict[str, Any]:
    """What the file says."""
    by_role: dict[str, list[dict[str, Any]]] = {"valkey": [], "gateway": [], "prefill": [], "decode": []}
    for one in processes:
        entry = {"name": one.name, "pid": one.pid, "restarts": one.restarts, **(one.announced or {})}
        by_role[one.role].append(entry)
    return {
        "pid": os.getpid(),
        "redis_url": shared.redis_url,
        "secret": shared.block_secret,
        "valkey": next(iter(by_role["valkey"]), None),
        "gateway": by_role["gateway"][0],
        "prefill": by_role["prefill"],
        "decode": by_role["decode"],
    }
