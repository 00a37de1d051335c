"""One rank of a group killed or stopped in a state of the handoff, and what must hold then.

Streams go on with the tokens of a run without faults, the group goes and comes back as one, and all blocks
are free.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.faults.conftest import Breakable
from tests.faults.failpoints import kill
from tests.faults.requests import ask, check_same, retries
from tests.faults.system import alive, eventually, settle

MIX = ("greedy", "seeded", "two choices")
STATES = [
    ("prefill", "prefill.queued", 0),
    ("prefill", "prefill.asked", 0),
    ("prefill", "prefill.granted", 0),
    ("prefill", "prefill.chunk", 2),
    ("prefill", "prefill.before_commit", 1),
    ("prefill", "prefill.committed", 1),
    ("decode", "decode.verified", 1),
    ("decode", "decode.step", 12),
]
Ranks = Callable[[str], list[int]]
"""Returns the processes of a role's worker, rank 0 first."""


def kill_in_state(
    system: Breakable, ranks: Ranks, state: tuple[str, str, int], victim: int, *, gone_s: float
) -> None:
    """Stop rank 0 in a state, kill rank `victim`, and let rank 0 go on if it was the other.

    The group must be gone within `gone_s` seconds. Prompts have another length in every call: cached ones
    have one chunk.
    """
    role, where, after = state
    length = 100 + 2 * STATES.index(state) + victim
    system.armory.arm(where, "freeze", after=after)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, system.address, MIX, length=length)
        stopped = system.armory.wait_taken(where)
        processes = ranks(role)
        assert processes[0] == stopped
        assert len(processes) == 2
        kill(processes[victim])
        if victim:
            os.kill(stopped, signal.SIGCONT)
        eventually(lambda: not alive(processes), gone_s, "the whole group is gone")
        answers = asked.result()
    settle(system.stack)
    check_same(ask(system.address, MIX, length=length), answers)
    assert where == "prefill.committed" or retries(answers.values())
    assert len(ranks(role)) == 2
    system.stack.wait_idle(120)


def stop_in_step(system: Breakable, ranks: Ranks, role: str) -> None:
    """Stop rank 1 in a step, and kill it 3 s later: rank 0 answers meanwhile, and its step is late."""
    expected = ask(system.address, ["greedy"], length=120)
    where = {"prefill": "prefill.granted", "decode": "decode.step"}[role]
    system.armory.arm(where, "freeze", after=0 if role == "prefill" else 8)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, system.address, ["greedy"], length=121)
        stopped = system.armory.wait_taken(where)
        processes = ranks(role)
        os.kill(processes[1], signal.SIGSTOP)
        os.kill(stopped, signal.SIGCONT)
        time.sleep(3)
        kill(processes[1])
        answers = asked.result()
    settle(system.stack)
    check_same(ask(system.address, ["greedy"], length=121), answers)
    check_same(expected, ask(system.address, ["greedy"], length=120))
