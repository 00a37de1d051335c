"""`python -m lab.row_ways`: seconds that an image's rows take from an encode worker to a prefill worker.

Two processes with the workers' own ends of the link, and no model: rows are there, and asked for again once
they have come. The ways take turns, so that what else the machine does meets all of them.

1. stream, gRPC: parts are messages of the workers' link;
2. stream, Unix: the same within a host, as it is without another way;
3. tcp: frames on a data socket;
4. shared_memory: through slots of a mapped region.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from diptych.runtime.rpc import bind, make_server
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.runtime.rpc_streams.unix_server import UnixServer
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.embedding_client import EmbeddingClient, EncoderAddress
from kvtransfer.drivers.embedding_link import EmbeddingFingerprint
from kvtransfer.drivers.embedding_server import EmbeddingServer
from kvtransfer.drivers.rows_link import RowsLink
from kvtransfer.protocol.messages import Key, WriterId
from kvtransfer.transports.row_registry import make_row_listeners

FINGERPRINT = EmbeddingFingerprint("m" * 64, "qwen3_vl", "float32")
WAYS = {"stream, gRPC": (), "stream, Unix": (), "tcp": ("tcp",), "shared_memory": ("shared_memory",)}
_OVER_UNIX = frozenset(WAYS) - {"stream, gRPC"}
_HOST = "127.0.0.1"


def serve(rows: int, width: int, addresses: Connection) -> None:
    """Run encode workers without an encoder, one with a Unix socket and one without, until killed."""
    asyncio.run(_serve(torch.rand(rows, width), addresses))


async def _serve(rows: torch.Tensor, addresses: Connection) -> None:
    def answer(link: RowsLink, key: Key, digest: bytes, generation: int) -> None:
        link.send_rows(generation, digest, rows)

    found, running = [], []
    for over_unix in (False, True):
        server = EmbeddingServer(
            WriterId("encode", 1),
            FINGERPRINT,
            on_ask=answer,
            on_taken=lambda key: None,
            on_lost=lambda link: None,
            listeners=make_row_listeners(_HOST, None),
        )
        await server.start()
        edge = make_server(internal=True)
        add_links(edge, [server.service])
        address = f"{_HOST}:{bind(edge, _HOST, 0, False)}"
        await edge.start()
        if over_unix:
            await UnixServer([server.service]).open(address)
        found.append(address)
        running.append((server, edge))
    addresses.send(found)
    await asyncio.Event().wait()


class Reader:
    """A prefill worker's end of one way."""

    def __init__(self, address: str, transports: Sequence[str]) -> None:
        self._where = EncoderAddress(address, 1)
        self._came = asyncio.Event()
        self._failed = ""
        self._images = 0
        self._client = EmbeddingClient(
            WriterId(f"prefill over {transports}", 1),
            FINGERPRINT,
            on_rows=lambda key, digest, rows: self._came.set(),
            on_failed=self._fail,
            transports=transports,
        )

    async def fetch(self) -> float:
        """Return the seconds from an ask to its rows. Raises RuntimeError if they do not come."""
        self._images += 1
        self._came.clear()
        began = time.monotonic()
        self._client.ask(self._where, (f"r{self._images}", 1), b"i" * 32)
        await self._came.wait()
        if self._failed:
            raise RuntimeError(self._failed)
        return time.monotonic() - began

    async def close(self) -> None:
        """End the link."""
        await self._client.close()

    def _fail(self, key: Key, failure: work_pb2.Failure) -> None:
        self._failed = failure.message
        self._came.set()


async def measure(addresses: Sequence[str], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each way, one a turn; the first turn of each is not counted."""
    readers = {way: Reader(addresses[way in _OVER_UNIX], transports) for way, transports in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        for way, reader in readers.items():
            took = await reader.fetch()
            if turn:
                seconds[way].append(took)
    for reader in readers.values():
        await reader.close()
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m lab.row_ways", description=__doc__)
    parser.add_argument("--rows", type=int, default=4096, help="of the image")
    parser.add_argument("--width", type=int, default=2048, help="numbers of a row, float32")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    encode = context.Process(target=serve, args=(options.rows, options.width, theirs), daemon=True)
    encode.start()
    try:
        seconds = asyncio.run(measure(ours.recv(), options.turns))
    finally:
        encode.kill()
    size = options.rows * options.width * 4
    print(f"{options.rows} rows of {options.width} float32, {size >> 20} MiB; {options.turns} turns\n")
    print("| way | ms, median | least–most | GB/s |\n|---|---|---|---|")
    for way, found in seconds.items():
        median = statistics.median(found)
        spread = f"{1e3 * min(found):.1f}–{1e3 * max(found):.1f}"
        print(f"| {way} | {1e3 * median:.1f} | {spread} | {size / median / 1e9:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
