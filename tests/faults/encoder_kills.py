"""An encode worker, or one that works with it, is killed or stopped in every state of an image.

    python -m tests.faults.encoder_kills [--times 3] [--state E1 …] [--victim encode …] [--way killed …]
        [--family idefics3 …] [--transport auto …] [--output FILE]

Prompts have three images each. A process that reaches the state is stopped there. A victim that is killed
gets SIGKILL, one that is stopped goes on after `STOPPED_S`. Answers must equal those without faults, and then
those of a system that is whole again; no worker may have anything left. In one half of the runs prefill
workers have an encoder of their own, in the other none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from diptych.client import AsyncClient, CallFailed, Completion, chat
from tests import vision_models
from tests.faults.conftest import Breakable
from tests.faults.failpoints import kill
from tests.faults.figures import Figure, Result, add_output, count, tell
from tests.faults.requests import LONG, SAMPLED, TIMEOUT_S, check_same, stream
from tests.faults.states import Role, State, Victim
from tests.faults.system import (
    PAIRS,
    breakable_system,
    flush_prefixes,
    settle,
    signal_if_alive,
)

FAMILIES = ("idefics3", "qwen3_vl")
"""Families: images of the first have several tiles, rows of the other a part for each of the first layers."""
TRANSPORTS = ("auto", "tcp")
"""With `auto` rows go through shared memory."""
FLAGS = (*PAIRS, "--encode-workers", "2", "--kv-blocks", "512", "--set", "gateway.max-images=4")
WITHOUT_OWN = ("--set", "prefill.image-encoder=false")
ASKS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0, **LONG},
    "two choices": {**SAMPLED, "n": 2, **LONG},
}
STOPPED_S = 5.0
STATES = (
    State("E1", "pixels received", "encode.received", "encode"),
    State("E2", "rows asked for", "encode.asked", "encode", after=1),
    State("E3", "a tile encoded", "encode.tile", "encode", after=2),
    State("E4a", "rows copied, not announced", "encode.copied", "encode", after=1),
    State("E4", "rows on their way", "encode.part", "encode", after=1),
    State("E5", "rows arrive", "prefill.rows", "prefill", after=1),
    State("E6", "rows taken", "encode.taken", "encode"),
)
VICTIMS: tuple[Victim, ...] = ("encode", "prefill", "decode", "all encode")
WAYS = ("killed", "stopped")
Cell = tuple[State, Victim, str]


def images_of(name: str) -> list[bytes]:
    """Return the files of a question's images, of odd sizes."""
    first = 10 * sorted(ASKS).index(name)
    sizes = ((40, 40), (97, 31), (19, 88))
    return [vision_models.png(vision_models.picture(first + n, *size)) for n, size in enumerate(sizes)]


def ask(address: str) -> dict[str, Completion]:
    """Return the streamed answers, all asked at once."""

    async def all_of_them() -> list[Completion]:
        async with AsyncClient(address, retries=0) as client:
            prompts = {name: chat("What are these?", images=images_of(name)) for name in ASKS}
            return await asyncio.gather(*(stream(client, prompts[name], ASKS[name]) for name in ASKS))

    return dict(zip(ASKS, asyncio.run(all_of_them()), strict=True))


def strike(system: Breakable, state: State, victim: Victim, way: str) -> None:
    """Hit processes while an image is on its way. Raises AssertionError for what is wrong afterwards."""
    flush_prefixes(system.stack)
    expected = ask(system.address)
    system.stack.wait_idle(10)
    flush_prefixes(system.stack)
    system.armory.arm(state.failpoint, "freeze", after=state.after)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, system.address)
        reached = system.armory.wait_taken(state.failpoint)
        targets = _targets(system, victim, reached, state.role)
        for target in targets:
            if way == "killed":
                kill(target)
            else:
                signal_if_alive(target, signal.SIGSTOP)
        if reached not in targets:
            signal_if_alive(reached, signal.SIGCONT)
        if way == "stopped":
            time.sleep(STOPPED_S)
            for target in targets:
                signal_if_alive(target, signal.SIGCONT)
        answers = asked.result(TIMEOUT_S)
    check_same(expected, answers)
    settle(system.stack)
    flush_prefixes(system.stack)
    check_same(expected, ask(system.address))
    system.stack.wait_idle(10)


def _targets(system: Breakable, victim: Victim, reached: int, role: Role) -> list[int]:
    """Return the processes to hit while the process `reached` of this role is stopped."""
    account = system.stack.account
    if victim == "all encode":
        return [int(one["pid"]) for one in account["encode"] if one.get("pid")]
    if victim == role:
        return [reached]
    busy = [_load(system, victim, index) for index in range(len(account[victim]))]
    return [int(account[victim][busy.index(max(busy))]["pid"])]


def _load(system: Breakable, role: Victim, index: int) -> float:
    names = ("diptych_requests_running", "diptych_requests_waiting")
    with contextlib.suppress(OSError, KeyError):  # a starved worker may not answer in time
        return sum(system.stack.metric(role, name, index) for name in names)
    return 0.0


def run(system: Breakable, plan: Sequence[Cell], what: str = "") -> list[str]:
    """Carry out the plan, and print each of its lines; return what was wrong."""
    failures = []
    for state, victim, way in plan:
        began, wrong = time.monotonic(), ""
        try:
            strike(system, state, victim, way)
        except (AssertionError, CallFailed) as error:
            wrong = str(error).partition("\n")[0][:300]
            failures.append(f"{state.name} {victim} {way}{what}: {wrong}")
            settle(system.stack)
        took = time.monotonic() - began
        print(f"{state.name} {victim} {way}{what}: {wrong or 'ok'} in {took:.1f} s", flush=True)
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit status is 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.encoder_kills", description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="for each state, victim and way")
    parser.add_argument("--state", nargs="*", default=[state.name for state in STATES])
    parser.add_argument("--victim", nargs="*", default=list(VICTIMS))
    parser.add_argument("--way", nargs="*", default=list(WAYS))
    parser.add_argument("--family", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--transport", nargs="*", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--without-own", action="store_true", help="only where no prefill worker encodes")
    add_output(parser)
    options = parser.parse_args(argv)
    states = [state for state in STATES if state.name in options.state]
    turns = itertools.product(range(options.times), states, options.victim, options.way)
    plan = [one[1:] for one in turns]
    failures: list[str] = []
    own = ((), WITHOUT_OWN)[int(options.without_own) :]
    systems = list(itertools.product(options.family, options.transport, own))
    for family, transport, flags in systems:
        what = f", {family} over {transport}{', no other encoder' if flags else ''}"
        write = partial(vision_models.write, family)
        with breakable_system(*FLAGS, "--transport", transport, *flags, write=write) as (system, _):
            failures += run(system, plan, what)
    figures = [
        Figure("processes killed or stopped with images on their way", str(len(systems) * len(plan))),
        count("times that an answer or the state of the system was wrong", len(failures), 0),
    ]
    return tell(Result("Kills of encode workers", figures, failures=failures), options.output)


if __name__ == "__main__":
    sys.exit(main())
