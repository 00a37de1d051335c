"""Turn of a running system: a closed loop of clients with the same lengths."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from diptych.bench.backends.grpc import GrpcBackend
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.datasets.synthetic import RandomLengths
from diptych.bench.drive import Run, drive
from diptych.bench.load import Load
from lab.peers.process import RunningServer

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Size:
    """Size of a turn: ``clients`` in a closed loop, each of them with so many requests."""

    clients: int = 16
    per_client: int = 4
    input_len: int = 128
    output_len: int = 64


async def closed_turn(system: RunningServer, size: Size, seed: int) -> Run:
    """Raises RuntimeError if a request fails."""
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


def tell_round(done: int, rounds: int) -> None:
    """Print how far a measurement by turns is, on a line of its own that is written over."""
    print(f"\rround {done} of {rounds}", end="" if done < rounds else "\n", file=sys.stderr, flush=True)


def tokens_of(run: Run) -> int:
    """Output tokens that came."""
    return sum(outcome.reply.output_tokens for outcome in run.outcomes if outcome.reply is not None)
