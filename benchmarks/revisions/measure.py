"""Both systems by turns: tokens a second, and the CPU time that a token costs a whole system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.backends.asking import Asking
from benchmarks.backends.grpc import GrpcBackend
from benchmarks.cpu_time import cpu_s, family_of
from benchmarks.datasets.synthetic import RandomLengths
from benchmarks.drive import Run, drive
from benchmarks.load import Load
from benchmarks.peers.process import RunningServer

TIMEOUT_S = 300.0
WARM_UP_SEED = 1


@dataclass(frozen=True)
class Size:
    """Of one turn: ``clients`` in a closed loop, each of them with so many requests."""

    clients: int = 16
    per_client: int = 4
    input_len: int = 128
    output_len: int = 64


@dataclass(frozen=True)
class Turn:
    """One system in one round."""

    tokens_per_s: float
    cpu_ms_per_token: float  # of all its processes
    steal_share: float


def by_turns(
    systems: Sequence[RunningServer], size: Size, rounds: int, tell: Callable[[int], None]
) -> list[list[Turn]]:
    """For each round, a turn of each system. Raises RuntimeError if a request fails."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for system in systems:
            runner.run(_load(system, size, WARM_UP_SEED))
        return [_round(runner, systems, size, number, tell) for number in range(rounds)]


def _round(
    runner: asyncio.Runner,
    systems: Sequence[RunningServer],
    size: Size,
    number: int,
    tell: Callable[[int], None],
) -> list[Turn]:
    """Who is first in one round is last in the next."""
    order = range(len(systems)) if number % 2 == 0 else range(len(systems))[::-1]
    turns = {index: _turn(runner, systems[index], size, WARM_UP_SEED + 1 + number) for index in order}
    tell(number + 1)
    return [turns[index] for index in range(len(systems))]


def _turn(runner: asyncio.Runner, system: RunningServer, size: Size, seed: int) -> Turn:
    processes = family_of(system.pid)
    before = sum(map(cpu_s, processes))
    run = runner.run(_load(system, size, seed))
    used = sum(map(cpu_s, processes)) - before
    tokens = sum(outcome.reply.output_tokens for outcome in run.outcomes if outcome.reply is not None)
    return Turn(tokens / run.duration, 1000 * used / tokens, run.steal_share)


async def _load(system: RunningServer, size: Size, seed: int) -> Run:
    requests = RandomLengths(size.input_len, size.output_len).requests(size.clients * size.per_client, seed)
    backend = GrpcBackend(system.address, Asking(ignore_eos=True, timeout_s=TIMEOUT_S))
    try:
        run = await drive(backend, Load(max_concurrency=size.clients), requests, seed)
    finally:
        await backend.close()
    failed = next((one.error for one in run.outcomes if one.error is not None), None)
    if failed is not None:
        raise RuntimeError(f"{system.server.name}: {failed}")
    return run
