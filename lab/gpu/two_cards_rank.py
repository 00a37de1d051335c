"""The program of a rank of two: KIND RANK PORT [FD]; rank 0 prints what it measured, in seconds, as JSON.

Both ranks make the same calls in one order. Rank 1 samples nothing and follows.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import torch

from diptych.engine.backends.triton.cuda_graph import capture_for
from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.gloo_communicator import BUILD_S, LOOPBACK
from diptych.engine.parallel.kv_shares import kv_shares
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.parallel.pipeline import Links
from diptych.engine.parallel.stages import Grid, deal_stages
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel_model import join_group
from kvtransfer.transports.process_group import open_store
from lab.gpu.model_step import DRY, WHOLE, Bench, Sizes, decode_seconds, prefill_seconds, record, tiny
from lab.gpu.random_model import LLAMA_3_8B, random_weights
from lab.gpu.section import Context
from lab.gpu.two_cards import RANKS

_EXCHANGES = 32
"""Exchanges of one recording."""


class OnDevice:
    """Communicator of a dry run, of which is said that its exchanges may be recorded."""

    on_device = True

    def __init__(self, inner: Communicator) -> None:
        self.rank, self.ranks = inner.rank, inner.ranks
        self.all_gather, self.gather, self.all_to_all = inner.all_gather, inner.gather, inner.all_to_all


class Followed:
    """Step that another rank collects."""

    def collect(self) -> None:
        """Return nothing: the tokens are rank 0's."""


class Follower:
    """Backend of rank 1, for what is written for rank 0."""

    def __init__(self, own: TritonPartsBackend) -> None:
        self._own = own

    def forward(self, sequences: Sequence[SequenceStep], abort: None) -> None:
        """Compute this rank's share of a step."""
        self._own.follow(sequences)

    def forward_and_sample(self, sequences: Sequence[SequenceStep], rows: object, abort: None) -> None:
        """Compute this rank's share of a step."""
        self._own.follow(sequences)

    def launch(self, sequences: Sequence[SequenceStep], rows: object, abort: None) -> Followed:
        """Compute this rank's share of a step."""
        self._own.follow(sequences)
        return Followed()


def main(argv: Sequence[str]) -> None:
    """Join the other rank and measure."""
    kind, rank, port, *fds = argv
    number, dry = int(rank), kind == "dry"
    device = torch.device("cpu") if dry else torch.device("cuda", number)
    if not dry:
        torch.cuda.set_device(device)
    context = Context(device, kind == "quick", lambda line: None, dry=dry)
    listener = socket.socket(fileno=int(fds[0])) if fds else None
    links = join_group(
        number, Grid(RANKS), (), lambda: open_store(LOOPBACK, int(port), listener, BUILD_S), device, LOOPBACK
    )
    if dry:
        links = Links(OnDevice(links.ranks))
    sizes = context.pick(WHOLE, WHOLE, DRY)
    bench = _bench(context, links, sizes)
    found = {
        "way": type(links.ranks).__name__,
        "decode": {batch: decode_seconds(context, bench, batch)[0] for batch in sizes.batches},
        "exchange": {batch: exchange_seconds(context, links.ranks, batch) for batch in sizes.batches},
        "prefill": prefill_seconds(context, bench),
    }
    if number == 0:
        print(json.dumps(found), flush=True)


def _bench(context: Context, links: Links, sizes: Sizes) -> Bench:
    """Record decode steps of this rank, in a memory of its share of each block."""
    shape = tiny(LLAMA_3_8B) if context.dry else LLAMA_3_8B
    rank, dealt, stages = links.ranks.rank, deal_parts(shape, RANKS), deal_stages(shape, 1)
    own = dealt[rank].shape_of(shape)
    backend = TritonPartsBackend(
        shape,
        dealt,
        [random_weights(own, context.device, torch.bfloat16)],
        links,
        stages[0],
        stop_word=StopWord(),
        device=context.device,
        held=kv_shares(dealt, stages, Grid(RANKS))[rank],
    )
    bench = record(f"rank {rank}", own, sizes, backend, context.device)
    if rank == 0:
        return bench
    return Bench(bench.name, bench.shape, sizes, cast(Any, Follower(backend)), bench.memory)


def exchange_seconds(context: Context, communicator: Communicator, rows: int) -> float:
    """Return the median seconds of an exchange of so many rows, as a recorded step has it."""
    hidden = (tiny(LLAMA_3_8B) if context.dry else LLAMA_3_8B).hidden_size
    own = torch.zeros((1, rows, hidden), dtype=torch.bfloat16, device=context.device)

    def work() -> None:
        for _ in range(_EXCHANGES):
            communicator.all_gather(own)

    replay = capture_for(context.device).capture(work)
    seconds = []
    for _ in range(context.pick(30, 10, 2)):
        context.synchronize()
        started = time.perf_counter()
        replay()
        context.synchronize()
        seconds.append((time.perf_counter() - started) / _EXCHANGES)
    return statistics.median(seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
