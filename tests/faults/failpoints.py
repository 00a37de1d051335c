"""Making processes of a running system fail at named places: see diptych/runtime/failpoints.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

TAKEN_WITHIN_S = 60.0


class Armory:
    """The folder in which failpoints are armed. Start the system with `environment`."""

    def __init__(self, folder: Path, local_prefill: str = "never") -> None:
        self._folder = folder
        self._local_prefill = local_prefill
        self._freezing: set[str] = set()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "DIPTYCH_FAILPOINTS_DIR": str(self._folder),
            "DIPTYCH_LOCAL_PREFILL": self._local_prefill,
        }

    def arm(self, name: str, action: str, *, after: int = 0) -> None:
        """The next process that passes `name` does `action`, once it passed `after` times; only one does."""
        for old in self._folder.glob(f"{name}.*"):
            old.unlink()
        (self._freezing.add if action == "freeze" else self._freezing.discard)(name)
        fresh = self._folder / f".{name}"
        fresh.write_text(f"{action} {after}")
        fresh.rename(self._folder / name)

    def disarm(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def taken(self, name: str) -> int | None:
        """The process that did what `name` was armed for, if one has."""
        return next((int(path.suffix[1:]) for path in self._folder.glob(f"{name}.*")), None)

    def wait_taken(self, name: str, within_s: float = TAKEN_WITHIN_S) -> int:
        """The process that did it. One that freezes has stopped: before that a SIGCONT would be lost."""
        until = time.monotonic() + within_s
        while (pid := self.taken(name)) is None or (name in self._freezing and not _stopped(pid)):
            if time.monotonic() > until:
                self.disarm(name)  # or it goes off in another test
                raise AssertionError(f"nobody came to {name}")
            time.sleep(0.005)
        return pid


def _stopped(pid: int) -> bool:
    """By a signal; also true of a process that is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "TZX"


def kill(pid: int) -> None:
    """SIGKILL, and no other signal before it."""
    os.kill(pid, signal.SIGKILL)
