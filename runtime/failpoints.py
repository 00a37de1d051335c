"""Named places where a test can make a running process fail. Off unless DIPTYCH_FAILPOINTS names them.

`DIPTYCH_FAILPOINTS=handover.drop_block,prefill.before_commit=pause` arms the first for `failpoint`
and makes the second's `failpause` never return, so that a test can kill the process right there.
The variable is read once, at import: an unarmed failpoint costs one look-up in an empty set.
"""

import asyncio
import logging
import os

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


def failpoint(name: str) -> bool:
    """True when `name` is armed: the caller then misbehaves as its name says."""
    return name in _FAILING


async def failpause(name: str) -> None:
    """Never returns when `name=pause` is armed; says so in the log first, for the test to see."""
    if name in _PAUSING:
        _log.warning("failpoint %s: paused", name)
        await asyncio.Event().wait()
