"""Turns of both systems: tokens a second, and the CPU time that a token costs a whole system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop

from diptych.bench.cpu_time import cpu_s, family_of
from lab.closed_turn import Size, closed_turn, tokens_of
from lab.peers.process import RunningServer

WARM_UP_SEED = 1


@dataclass(frozen=True)
class Turn:
    """Result of one system in one round."""

    tokens_per_s: float
    cpu_ms_per_token: float  # of all its processes
    steal_share: float


def by_turns(
    systems: Sequence[RunningServer], size: Size, rounds: int, tell: Callable[[int], None]
) -> list[list[Turn]]:
    """Return a turn of each system for each round. Raises RuntimeError if a request fails."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for system in systems:
            runner.run(closed_turn(system, size, WARM_UP_SEED))
        return [_round(runner, systems, size, number, tell) for number in range(rounds)]


def _round(
    runner: asyncio.Runner,
    systems: Sequence[RunningServer],
    size: Size,
    number: int,
    tell: Callable[[int], None],
) -> list[Turn]:
    """Measure each system once; the first of one round is the last of the next."""
    order = range(len(systems)) if number % 2 == 0 else range(len(systems))[::-1]
    turns = {index: _turn(runner, systems[index], size, WARM_UP_SEED + 1 + number) for index in order}
    tell(number + 1)
    return [turns[index] for index in range(len(systems))]


def _turn(runner: asyncio.Runner, system: RunningServer, size: Size, seed: int) -> Turn:
    processes = family_of(system.pid)
    before = sum(map(cpu_s, processes))
    run = runner.run(closed_turn(system, size, seed))
    used = sum(map(cpu_s, processes)) - before
    tokens = tokens_of(run)
    return Turn(tokens / run.duration, 1000 * used / tokens, run.steal_share)
