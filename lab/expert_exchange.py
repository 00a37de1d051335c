"""`python -m lab.expert_exchange`: bytes and time of a layer's exchanges, by how rows meet experts.

    one step     sums of all parts to all ranks (what short steps do)
    two steps    `--all2all-backend allgather_reducescatter`
    all-to-all   `--all2all-backend all_to_all`

Ranks are processes that exchange over Gloo on the loopback, one part each, with the product's own classes.
Experts are one number wide: what is measured is routing, exchange and what brings rows together. A layer has
two sums in the first two, the one behind attention and that of the experts. Ways take turns, round by round;
figures are medians of rank 0.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional

from diptych.engine.backends.torch import part_sums
from diptych.engine.backends.torch.expert_rows import ExpertRows
from diptych.engine.backends.torch.experts import ExpertFeedForward
from diptych.engine.backends.torch.part_sums import PartSums
from diptych.engine.models.shape import ExpertsShape
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.gloo_communicator import BUILD_S, GlooCommunicator
from diptych.engine.parallel.parts import deal
from diptych.engine.weights import ExpertWeights
from diptych.runtime.python_module import module_command
from kvtransfer.transports.process_group import listen_for_store, open_store

EXPERTS, HIDDEN = 32, 2048


class Counting:
    """A communicator that counts the bytes that come from other ranks."""

    on_device = False

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.ranks, self.received = inner.rank, inner.ranks, 0

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        self.received += own.nbytes * (self.ranks - 1)
        return self._inner.all_gather(own)

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        self.received += own.nbytes * (self.ranks - 1) * (self.rank == 0)
        return self._inner.gather(own)

    def all_to_all(
        self, own: Sequence[torch.Tensor], rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        came = self._inner.all_to_all(own, rows)
        self.received += sum(one.nbytes for at, one in enumerate(came) if at != self.rank)
        return came


class Layer:
    """The exchanges of one layer, between attention's outputs and the rows that the next layer reads."""

    def __init__(self, communicator: Communicator, rows: int, picked: int) -> None:
        self.communicator = Counting(communicator)
        self._sums = PartSums(self.communicator, communicator.ranks)
        spans = deal(EXPERTS, communicator.ranks)
        random = torch.Generator().manual_seed(communicator.rank)
        own = spans[communicator.rank]
        gates, ups, downs = (tuple(torch.randn(*size, generator=random) for _ in own) for size in _SIZES)
        router = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(99))
        weights = ExpertWeights(router, gates, ups, downs)
        shape = ExpertsShape(EXPERTS, picked, 1, held=own)
        experts = ExpertFeedForward(shape, weights, functional.linear, _dense, _gate)
        self._whole, self._experts = experts, ExpertRows(self.communicator, [experts], spans)
        self._output = torch.randn(rows, HIDDEN, generator=random)

    def summed(self, least: int) -> None:
        """Add the parts of attention, compute own experts for all rows, and add these, in one step or two."""
        with mock.patch.object(part_sums, "LEAST_SAVED_BYTES", least):
            attended = self._sums.of_all_rows([self._output])
            self._sums.of_all_rows([self._whole(attended)])

    def sent(self) -> None:
        """Add attention's parts of own rows, send these to their experts and back, and gather them."""
        shares = self._sums.shares(len(self._output))
        attended = self._sums.of_own_rows([self._output], shares)
        fed = self._experts(attended, shares.own_parts(self.communicator.rank))
        self._sums.gather_rows(fed, shares)


_SIZES = ((1, HIDDEN), (1, HIDDEN), (HIDDEN, 1))


def _dense(matrix: object) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor)
    return matrix


def _gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def serve(rank: int, ranks: int, port: int, rows: int, picked: int, rounds: int) -> dict[str, list[float]]:
    """Take part as one rank; return MiB that come and median milliseconds, by way."""
    torch.set_num_threads(1)
    listener = None
    if rank == 0:
        listener = socket.socket(fileno=port)
        port = int(listener.getsockname()[1])
    store: c10d.Store = open_store("127.0.0.1", port, listener, BUILD_S)
    layer = Layer(GlooCommunicator(store, rank, ranks), rows, picked)
    ways: dict[str, Callable[[], None]] = {
        "one step": lambda: layer.summed(sys.maxsize),
        "two steps": lambda: layer.summed(0),
        "all-to-all": layer.sent,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    received = dict.fromkeys(ways, 0)
    for _ in range(rounds + 1):  # the first warms up
        for name, way in ways.items():
            layer.communicator.all_gather(torch.zeros(1))  # all begin together
            layer.communicator.received = 0
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
            received[name] = layer.communicator.received
    return {name: [received[name] / 2**20, 1000 * statistics.median(seconds[name][1:])] for name in ways}


def measure(ranks: int, rows: int, picked: int, rounds: int) -> dict[str, list[float]]:
    """Start the ranks; return what rank 0 found."""
    listener, port = listen_for_store("127.0.0.1")
    given = [ranks, rows, picked, rounds]
    command = module_command("lab.expert_exchange")
    processes = [
        subprocess.Popen(
            [*command, "--rank", *map(str, [rank, listener.fileno() if rank == 0 else port, *given])],
            pass_fds=[listener.fileno()] if rank == 0 else [],
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    found: dict[str, list[float]] = json.loads(outputs[0])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of ranks, experts a row and ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="rows of the step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.rank is not None:
        rank, port, ranks, *rest = given.rank
        print(json.dumps(serve(rank, ranks, port, *rest)))
        return
    print(f"{given.rows} rows of {HIDDEN} float32, {EXPERTS} experts, Gloo on the loopback\n")
    print("| ranks | experts a row | way | MiB to a rank | ms |\n|---|---|---|---|---|")
    for ranks in (2, 4):
        for picked in (2, 8):
            for name, (mib, ms) in measure(ranks, given.rows, picked, given.rounds).items():
                print(f"| {ranks} | {picked} | {name} | {mib:.1f} | {ms:.1f} |")


if __name__ == "__main__":
    main()
