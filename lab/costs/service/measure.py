"""The bare engine and a whole system by turns."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from diptych.bench.cpu_time import cpu_s, family_of, main_thread_cpu_s
from diptych.bench.drive import Run
from diptych.runtime.python_module import module_command
from lab.closed_turn import Size, closed_turn, tokens_of
from lab.peers.process import RunningServer

WARM_UP_SEED = 1
EVENT_LOOP, OTHERS = "event loop", "other threads"
GENERATOR = "load generator"
_STOP_S = 15.0

Part = tuple[str, str]  # (process, which of its threads)


@dataclass(frozen=True)
class Round:
    """Output tokens a second of both, and seconds of CPU time that one token took each part of the system."""

    bare: float
    service: float
    cpu_s: Mapping[Part, float]
    steal_share: float

    @property
    def ratio(self) -> float:
        return self.service / self.bare

    @property
    def ratio_elsewhere(self) -> float:
        """Return the ratio as if the load generator had cores of its own."""
        all_parts = sum(self.cpu_s.values())
        ours = sum(used for (process, _), used in self.cpu_s.items() if process != GENERATOR)
        return self.ratio * all_parts / ours


class BareProcess:
    """`lab.costs.service.bare_engine`, which computes when it is asked to."""

    def __init__(self, child: subprocess.Popen[str], size: Size) -> None:
        self._child = child
        self._tokens = size.clients * size.output_len

    def tokens_per_s(self, seeds: range) -> float:
        """Return the rate of one round of prompts for each seed."""
        return self._tokens * len(seeds) / sum(map(self._seconds, seeds))

    def _seconds(self, seed: int) -> float:
        if self._child.stdin is None:
            raise RuntimeError("no server to ask")
        print(seed, file=self._child.stdin, flush=True)
        return float(_answer(self._child))


@contextmanager
def bare_engine(model: str, dtype: str, size: Size) -> Iterator[BareProcess]:
    """Raises RuntimeError if it does not come up."""
    sizes = (os.cpu_count() or 1, size.clients, size.input_len, size.output_len)
    command = [*module_command("lab.costs.service.bare_engine"), model, dtype, *map(str, sizes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            _answer(child)
            yield BareProcess(child, size)
        finally:
            if child.stdin is not None:
                child.stdin.close()  # which ends it
            child.wait(_STOP_S)


def _answer(child: subprocess.Popen[str]) -> str:
    line = child.stdout.readline() if child.stdout is not None else ""
    if not line:
        raise RuntimeError(f"the bare engine ended with status {child.wait(_STOP_S)}")
    return line


def by_turns(
    bare: BareProcess, system: RunningServer, size: Size, rounds: int, tell: Callable[[int], None]
) -> list[Round]:
    """Raises RuntimeError if a request fails."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(closed_turn(system, size, WARM_UP_SEED))
        bare.tokens_per_s(range(WARM_UP_SEED, WARM_UP_SEED + 1))
        measured = []
        for number in range(rounds):
            measured.append(_round(runner, bare, system, size, number))
            tell(number + 1)
    return measured


def _round(
    runner: asyncio.Runner, bare: BareProcess, system: RunningServer, size: Size, number: int
) -> Round:
    """Measure both, the first of one round last in the next. The bare engine gets half as many prompts."""
    first = WARM_UP_SEED + 1 + number * size.per_client
    seeds = range(first, first + max(size.per_client // 2, 1))
    if number % 2 == 0:
        alone = bare.tokens_per_s(seeds)
        run, by_part = _served(runner, system, size, first)
    else:
        run, by_part = _served(runner, system, size, first)
        alone = bare.tokens_per_s(seeds)
    return Round(alone, tokens_of(run) / run.duration, by_part, run.steal_share)


def _served(
    runner: asyncio.Runner, system: RunningServer, size: Size, seed: int
) -> tuple[Run, dict[Part, float]]:
    """Measure a turn of the system, and the CPU time of a token by part."""
    before = _cpu_of(system.pid)
    run = runner.run(closed_turn(system, size, seed))
    after = _cpu_of(system.pid)
    tokens = tokens_of(run)
    return run, {part: (used - before.get(part, 0.0)) / tokens for part, used in after.items()}


def _cpu_of(pid: int) -> dict[Part, float]:
    """Return the CPU seconds of a system and of this process since their start."""
    used: dict[Part, float] = {}
    for member in (*family_of(pid), os.getpid()):
        process = GENERATOR if member == os.getpid() else name_of(member)
        event_loop = main_thread_cpu_s(member)
        for threads, seconds in ((EVENT_LOOP, event_loop), (OTHERS, cpu_s(member) - event_loop)):
            used[process, threads] = used.get((process, threads), 0.0) + seconds
    return used


def name_of(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the Python module that a process runs, else its program."""
    words = (proc / str(pid) / "cmdline").read_text().split("\0")
    for mark in ("-m", module_command("")[2]):
        if mark in words:
            return words[words.index(mark) + 1]
    return Path(words[0]).name.split(" ")[0]  # some write more into it than their name
