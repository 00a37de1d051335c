"""Ready file: the machine-readable account of a running system, for scripts and tests.

    {"pid": 1, "redis_url": "redis://…", "secret": "…", "valkey": {"pid": 2, "port": 6379},
     "gateway": {"name": "gateway", "pid": 3, "restarts": 0, "grpc_port": 50051, "http_port": 8000,
                 "admin_port": 50052, "worker_id": "…"},
     "prefill": [{…}], "decode": [{…}], "encode": [{…}]}

A process that is down at the moment has no pid or no ports (null or absent). The file appears once the
system serves, is replaced in one step whenever a process ends or comes back, and goes at the end.
It holds the shared secrets: only its owner may read it.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diptych.cli.process_events import Event, Stale
from diptych.cli.stack import ROLES, SharedSecrets
from diptych.cli.supervisor import Running
from diptych.runtime.discovery.records import record_from_json


class ReadyFile:
    """Writes and removes the file at `path`. `observe` gets what goes wrong while the system serves."""

    def __init__(self, path: Path, observe: Callable[[Event], None]) -> None:
        self.path = path.absolute()
        self._observe = observe
        self._removed = False

    def write(self, shared: SharedSecrets, processes: Sequence[Running]) -> None:
        """Replace the file as a whole: a reader sees the old or the new one, never half. Raises OSError."""
        descriptor, name = _temporary_beside(self.path)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(account(shared, processes), file, indent=1)
            Path(name).replace(self.path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

    def update(self, shared: SharedSecrets, processes: Sequence[Running]) -> None:
        """Write as `write` does, of a system that serves, and goes on doing so where the file cannot be
        written.

        Does nothing after `remove`: news of a process may still be on its way when everything stops.
        """
        if not self._removed:
            self._try(partial(self.write, shared, processes))

    def remove(self) -> None:
        self._removed = True
        self._try(partial(self.path.unlink, missing_ok=True))

    def _try(self, change: Callable[[], None]) -> None:
        try:
            change()
        except OSError as error:
            self._observe(Stale(f"{self.path}", error.strerror or f"{error}"))


def why_unwritable(path: Path) -> str | None:
    """Return why no file can be written there; None where one can.

    It is tried: permissions do not bind root.
    """
    folder = path.absolute().parent
    if path.is_dir():
        return "it is a folder"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    try:
        descriptor, name = _temporary_beside(path)
        os.close(descriptor)
        Path(name).unlink()
    except OSError as error:
        return f"{folder} takes no new file: {error.strerror}"
    return None


def _temporary_beside(path: Path) -> tuple[int, str]:
    """Return a new file, open, and its name. Its owner alone can read it."""
    return tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")


def account(shared: SharedSecrets, processes: Sequence[Running]) -> dict[str, Any]:
    """Return the content of the file."""
    by_role: dict[str, list[dict[str, Any]]] = {name: [] for name in ("valkey", *ROLES)}
    for one in processes:
        announced = {name: value for name, value in (one.announced or {}).items() if name != "record"}
        entry = {"name": one.name, "pid": one.pid, "restarts": one.restarts, **announced}
        if one.announced is not None and "record" in one.announced:
            entry["model"] = record_from_json(str(one.announced["record"])).model_name
        by_role[one.role].append(entry)
    return {
        "pid": os.getpid(),
        "redis_url": shared.redis_url,
        "secret": shared.block_secret,
        "valkey": next(iter(by_role["valkey"]), None),
        "gateway": by_role["gateway"][0],
        "prefill": by_role["prefill"],
        "decode": by_role["decode"],
        "encode": by_role["encode"],
    }
