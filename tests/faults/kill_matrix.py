"""Real processes are killed in every state of a request's way: no token may be lost, repeated or another one.

    python -m tests.faults.kill_matrix [--kills 5] [--victim decode …] [--state S4 …] [--output FILE]

In each cell of state × victim the request enters the state and the process that did it is stopped there; the
victim gets SIGKILL, and the stopped process goes on, if it was another one. Then every answer must equal that
of the run without faults, the other workers must be empty and the victim and its children gone within 2 s.
Some victims are several processes, which are killed in one moment.

A killed gateway is a second one beside that of the system: its clients go on at the first one with their
resume tokens. Answers of two choices cannot be resumed: what they delivered must be a prefix of the right
one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from diptych.bench.cpu_time import family_of
from diptych.client import AsyncClient, CallFailed, Completion
from tests.end_to_end.stack import StackFailed
from tests.faults.conftest import Breakable
from tests.faults.failpoints import kill
from tests.faults.figures import Figure, Result, add_output, count, seconds, tell
from tests.faults.requests import ASKS, TIMEOUT_S, Asks, ask, check_same, prompt_of
from tests.faults.second_gateway import second_gateway
from tests.faults.states import LOCAL_STATES, STATES, VICTIMS, Role, State, Victim
from tests.faults.system import (
    PAIRS,
    alive,
    breakable_system,
    eventually,
    flush_prefixes,
    holding,
    settle,
    signal_if_alive,
)

MIX: Asks = {name: ASKS[name] for name in ("greedy", "seeded", "two choices")}
CLEAN_WITHIN_S = 2.0
BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)


@dataclass
class Cell:
    """What happened to one victim in one state."""

    kills: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.failures:
            return f"FAILED {len(self.failures)}/{self.kills}"
        return f"ok {self.kills}/{self.kills}" if self.kills else "not run"


@dataclass
class Matrix:
    """Every cell, and how long it took until all was clean."""

    cells: dict[tuple[str, Victim], Cell] = field(default_factory=dict)
    clean_s: list[float] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [
            f"{state}, {victim}: {text}"
            for (state, victim), cell in self.cells.items()
            for text in cell.failures
        ]

    def table(self) -> str:
        lines = [f"| state | {' | '.join(VICTIMS)} |", "|---" * (1 + len(VICTIMS)) + "|"]
        for state in (*STATES, *LOCAL_STATES):
            row = [str(self.cells.get((state.name, victim), Cell())) for victim in VICTIMS]
            lines.append(f"| {state.name} {state.what} | {' | '.join(row)} |")
        return "\n".join(lines)

    def result(self) -> Result:
        kills = sum(cell.kills for cell in self.cells.values())
        failed = len(self.failures)
        figures = [
            Figure("kills", str(kills)),
            count("kills after which an answer or the state of the system was wrong", failed, 0),
            seconds("from the last answer to all blocks free, p99", self.clean_s, 99, CLEAN_WITHIN_S),
        ]
        return Result("Kill matrix", figures, self.table(), self.failures)


def strike(system: Breakable, model: Path, state: State, victim: Victim, asks: Asks = MIX) -> float:
    """One kill. Seconds until all was clean; raises AssertionError for what is wrong."""
    if victim == "gateway":
        return _strike_gateway(system, model, state, asks)
    expected = _expected(system, state.prompt_tokens, asks)
    families = _families(system)  # now: what is stopped for long is given up before it is killed
    system.armory.arm(state.failpoint, "freeze", after=state.after)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(partial(ask, system.address, asks, length=state.prompt_tokens, asks=asks))
        stopped = system.armory.wait_taken(state.failpoint)
        targets = _pids(system, victim, stopped, state.role)
        doomed = [pid for target in targets for pid in families.get(target) or family_of(target)]
        for target in targets:
            kill(target)
        if stopped not in targets:
            signal_if_alive(stopped, signal.SIGCONT)
        answers = asked.result()
    check_same(expected, answers)
    return _clean(system, targets, doomed)


def _strike_gateway(system: Breakable, model: Path, state: State, asks: Asks) -> float:
    expected = _expected(system, state.prompt_tokens, asks)
    with second_gateway(system.stack, model, system.armory.environment) as second:
        system.armory.arm(state.failpoint, "freeze", after=state.after)
        with ThreadPoolExecutor(1) as other:
            addresses = [second.address, system.address]
            asked = other.submit(asyncio.run, _resumed(addresses, state.prompt_tokens, asks))
            stopped = system.armory.wait_taken(state.failpoint)
            doomed = family_of(second.pid)
            kill(second.pid)
            if stopped != second.pid:
                signal_if_alive(stopped, signal.SIGCONT)
            answers, broken = asked.result()
        check_same(expected, {name: one for name, one in answers.items() if name not in broken})
        for name in broken:
            _check_prefix(expected[name], answers[name])
    return _clean(system, doomed[:1], doomed)  # our own child: reaped by leaving the block


async def _resumed(
    addresses: Sequence[str], length: int, asks: Asks
) -> tuple[dict[str, Completion], set[str]]:
    """The answers, and which of them broke off."""
    broken: set[str] = set()

    async def one(client: AsyncClient, name: str) -> Completion:
        stream = client.stream(prompt_of(name, length), timeout_s=TIMEOUT_S, resume=True, **asks[name])
        async with stream:
            try:
                async for _ in stream:
                    pass
            except CallFailed as failure:
                if name != "two choices" or failure.code not in BROKEN:
                    raise
                broken.add(name)
            return stream.received.completion()

    async with AsyncClient(addresses) as client:
        answers = await asyncio.gather(*(one(client, name) for name in asks))
    return dict(zip(asks, answers, strict=True)), broken


def _check_prefix(right: Completion, got: Completion) -> None:
    whole = {choice.index: choice.token_ids for choice in right.choices}
    for choice in got.choices:
        ids = choice.token_ids
        assert ids == whole[choice.index][: len(ids)], "what came before the break is not a prefix"


_references: dict[tuple[str, int], Mapping[str, Completion]] = {}


def _expected(system: Breakable, length: int, asks: Asks) -> Mapping[str, Completion]:
    """The answers without a fault, asked once; what was cached is forgotten, so that prompts are computed."""
    if (system.address, length) not in _references:
        _references[system.address, length] = ask(system.address, asks, length=length, asks=asks)
    system.stack.wait_idle(10)
    flush_prefixes(system.stack)
    return _references[system.address, length]


def _families(system: Breakable) -> dict[int, list[int]]:
    """The processes of the system that may be killed, each with its children."""
    account = system.stack.account
    pids = [int(one["pid"]) for one in (*account["prefill"], *account["decode"], account["valkey"])]
    return {pid: family_of(pid) for pid in pids}


def _pids(system: Breakable, victim: Victim, stopped: int, role: Role) -> list[int]:
    """The processes to kill while the process `stopped` of this role is stopped."""
    if victim in ("all prefill", "all decode"):
        return [int(one["pid"]) for one in system.stack.account[victim.removeprefix("all ")]]
    victims: tuple[Victim, ...] = ("prefill", "decode") if victim == "pair" else (victim,)
    return [stopped if one == role else _pid(system, one) for one in victims]


def _pid(system: Breakable, victim: Victim) -> int:
    """Of the role's process that has the requests, if one has; the stopped process is of another role."""
    account = system.stack.account
    if victim == "redis":
        return int(account["valkey"]["pid"])
    names = ("diptych_requests_running", "diptych_requests_waiting")
    busy = [sum(system.stack.metric(victim, name, i) for name in names) for i in range(len(account[victim]))]
    return int(account[victim][busy.index(max(busy))]["pid"])


def _clean(system: Breakable, targets: Collection[int], doomed: Sequence[int]) -> float:
    """Wait for empty workers and reaped processes, then for whatever was started again."""
    began = time.monotonic()
    eventually(
        lambda: not holding(system.stack, targets) and not alive(list(doomed)),
        5 * CLEAN_WITHIN_S,
        f"all blocks free, {list(doomed)} gone",
    )
    took = time.monotonic() - began
    settle(system.stack)
    return took


def run(
    system: Breakable,
    model: Path,
    plan: Sequence[tuple[State, Victim]],
    say: bool = True,
    matrix: Matrix | None = None,
    asks: Asks = MIX,
) -> Matrix:
    """Carry out the kills of `plan` in its order while `asks` are asked; the cells of `matrix`, if given,
    gather them.
    """
    matrix = Matrix() if matrix is None else matrix
    for state, victim in plan:
        cell = matrix.cells.setdefault((state.name, victim), Cell())
        cell.kills += 1
        began = time.monotonic()
        try:
            took = strike(system, model, state, victim, asks)
            matrix.clean_s.append(took)
            if took > CLEAN_WITHIN_S:
                cell.failures.append(f"clean after {took:.1f} s only")
        except (AssertionError, CallFailed) as error:
            cell.failures.append(f"{str(error).partition(chr(10))[0][:300]} {_last_end(system)}".rstrip())
            try:
                settle(system.stack)
            except StackFailed:  # there is nothing left to kill in: what was found so far is told
                cell.failures.append("the system did not come back: the campaign ended here")
                break
        finally:
            if say:
                took = time.monotonic() - began
                print(f"{state.name} {victim}: {cell} in {took:.1f} s", *cell.failures[-1:], flush=True)
    return matrix


def _last_end(system: Breakable) -> str:
    """Return the gateway's words on the last request that ended with an error, from its log."""
    lines = system.stack.log.read_text(errors="replace").splitlines()
    found = [line.partition(" ends with ")[2] for line in lines if " ends with " in line]
    return f"({found[-1]})" if found else ""


def plan(kills: int, states: Sequence[str], victims: Sequence[str]) -> Iterator[tuple[State, Victim]]:
    """Victims by turns: who dies too often in a row is started again later each time."""
    for _, state, victim in itertools.product(range(kills), (*STATES, *LOCAL_STATES), VICTIMS):
        if state.name in states and victim in victims:
            yield state, victim


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kill_matrix", description=__doc__)
    parser.add_argument("--kills", type=int, default=5, help="in each cell")
    parser.add_argument("--state", nargs="*", default=[state.name for state in (*STATES, *LOCAL_STATES)])
    parser.add_argument("--victim", nargs="*", default=list(VICTIMS))
    parser.add_argument(
        "--gpu-sharing", metavar="WAY", help="each pair of workers in one process, as `diptych up` does it"
    )
    add_output(parser)
    options = parser.parse_args(argv)
    hosting = () if options.gpu_sharing is None else ("--device", "cpu", "--gpu-sharing", options.gpu_sharing)
    matrix, local = Matrix(), {state.name for state in LOCAL_STATES}
    for mode, names in (("never", set(options.state) - local), ("always", set(options.state) & local)):
        cells = list(plan(options.kills, sorted(names), options.victim))
        if cells:
            with breakable_system(*PAIRS, *hosting, local_prefill=mode) as (system, model):
                run(system, model, cells, matrix=matrix)
    return tell(matrix.result(), options.output)


if __name__ == "__main__":
    sys.exit(main())
