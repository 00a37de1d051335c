"""Rolling restart: every process of a running system gets a successor, one after the other, under load.

A worker's successor loads the model beside it, passes its self-test and is linked to the gateway before the
old one drains: capacity never sinks, memory is needed for one more worker. The gateway's successor finds the
workers before it opens the same ports; then the old one stops listening and finishes what it has. Valkey
cannot share its port: it ends and starts empty, and the workers write what they have again.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from diptych.cli.child import Announcement, ChildFailed, ids_of
from diptych.cli.up import Stack

ORDER = ("valkey", "decode", "prefill", "encode", "gateway")
AWAIT_WORKERS_S = 30
_PAUSE_S = 0.05


class UnknownProcess(LookupError):
    """No process of the system has this name; the message lists those that there are."""


async def rolling_restart(stack: Stack, names: Sequence[str], say: Callable[[str], None]) -> None:
    """Restart the named processes, or all of them; `say` gets a line for each when it is done.

    Raises UnknownProcess before anything happens, ChildFailed for the first one that gets no successor: it
    goes on, as do those after it.
    """
    running = stack.supervisor.running()
    known = dict.fromkeys(name for one in running for name in (one.name, one.process))
    if unknown := set(names) - set(known):
        raise UnknownProcess(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen: dict[str, str] = {}  # a process that hosts two workers restarts once
    for one in (one for role in ORDER for one in running if one.role == role):
        if not names or not {one.name, one.process}.isdisjoint(names):
            chosen.setdefault(one.process, one.role)
    for name, role in chosen.items():
        began = time.monotonic()
        await _restart(stack, name, role)
        say(f"{name} restarted in {time.monotonic() - began:.1f} s")


async def _restart(stack: Stack, name: str, role: str) -> None:
    supervisor = stack.supervisor
    if role == "valkey":
        await supervisor.end_and_await(name)
    elif role == "gateway":
        await supervisor.replace(name, {"await_workers_s": AWAIT_WORKERS_S}, _at_once)
    else:
        await supervisor.replace(name, {}, lambda announced: _linked(stack, name, announced))


async def _at_once(_: Announcement) -> None:
    """Return at once: the gateway looks for its workers before it announces itself."""


async def _linked(stack: Stack, name: str, announced: Announcement) -> None:
    """Return when the gateway gives work to this worker. Raises ChildFailed when it does not."""
    deadline = time.monotonic() + AWAIT_WORKERS_S
    while time.monotonic() < deadline:
        if all([await stack.ready(worker_id) for worker_id in ids_of(announced)]):
            return
        await asyncio.sleep(_PAUSE_S)
    raise ChildFailed(name, f"was not linked to the gateway within {AWAIT_WORKERS_S} s")
