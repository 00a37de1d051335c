"""Named places where a test can make a running process fail. Off unless the environment arms them.

For the life of a process: `DIPTYCH_FAILPOINTS=handoff.drop_block,prefill.before_commit=pause` arms the first
for `failpoint` and makes the second's `failpause` never return, so that a test can kill the process there.

While they run: `DIPTYCH_FAILPOINTS_DIR` names a folder. A file in it that is called like a failpoint arms
it once, for the first process that passes there; that one renames the file to `<name>.<pid>`, for the test to
see. The file says what happens, and how many times the process passes unharmed before (0 if it does not say):

    fail 2      `failpoint` is True at the third pass
    freeze      the process stops (SIGSTOP), until SIGCONT or SIGKILL
    crash 5     it dies (SIGKILL) at the sixth pass

Both variables are read once, at import: an unarmed failpoint costs a look-up in an empty set.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections import Counter
from pathlib import Path

_log = logging.getLogger(__name__)


def parse_failpoints(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """(names that fail, names that pause) of a comma list; raises ValueError for an unknown action."""
    failing: set[str] = set()
    pausing: set[str] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = item.partition("=")
        if action not in ("", "pause"):
            raise ValueError(f"failpoint {name}: unknown action {action!r}")
        (pausing if action else failing).add(name)
    return frozenset(failing), frozenset(pausing)


_FAILING, _PAUSING = parse_failpoints(os.environ.get("DIPTYCH_FAILPOINTS", ""))
_FOLDER = Path(folder) if (folder := os.environ.get("DIPTYCH_FAILPOINTS_DIR")) else None
_passes: Counter[tuple[str, int]] = Counter()  # by name, and by when it was armed


ARMED = bool(_FAILING) or _FOLDER is not None
"""True if a failpoint can be armed at all in this process."""


def failpoint(name: str) -> bool:
    """Return whether `name` is armed to fail: the caller then misbehaves as its name says."""
    return name in _FAILING or (_FOLDER is not None and _taken(name, _FOLDER))


def reach(name: str) -> None:
    """Freeze or kill the process at a place that is armed to: one without a misbehaviour of its own."""
    if _FOLDER is not None:
        _taken(name, _FOLDER)


def _taken(name: str, folder: Path) -> bool:
    """Carry out what the file of `name` says; whether that is to fail."""
    file, mine = folder / name, folder / f"{name}.{os.getpid()}"
    try:
        armed_at, (action, *skip) = file.stat().st_mtime_ns, file.read_text().split()
    except (FileNotFoundError, ValueError):  # not armed, or not yet written
        return False
    _passes[name, armed_at] += 1
    if _passes[name, armed_at] <= int(skip[0] if skip else 0):
        return False
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        file.rename(mine)
        _log.warning("failpoint %s: %s", name, action)
        if action != "fail":
            os.kill(os.getpid(), {"freeze": signal.SIGSTOP, "crash": signal.SIGKILL}[action])
        return action == "fail"
    return False


async def failpause(name: str) -> None:
    """Never returns when `name=pause` is armed; says so in the log first, for the test to see."""
    if name in _PAUSING:
        _log.warning("failpoint %s: paused", name)
        await asyncio.Event().wait()
