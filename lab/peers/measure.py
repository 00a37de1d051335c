"""Cell of the comparison: a load on one running server, by the load generator of `diptych bench`.

All servers get the same prompts: the seed depends on the round and the load alone. Token ids are sent, so
lengths are exact, and what each server says it read and wrote is held against what was asked.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import uvloop

from diptych.bench.backends import Backend
from diptych.bench.backends.grpc import GrpcBackend
from diptych.bench.backends.openai_http import OpenAIBackend
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.cpu_time import CpuTime
from diptych.bench.datasets.synthetic import RandomLengths
from diptych.bench.drive import Run, drive
from diptych.bench.load import Load
from diptych.bench.measurement import Figures, measure
from diptych.bench.request import BenchRequest
from lab.peers.cells import PREFILL, QUEUED, STREAMS, TEXT, Cell, Measurement, clients_of
from lab.peers.interference import LONG_PROMPT, QUEUED_PROMPTS, watch
from lab.peers.process import RunningServer
from lab.peers.servers import MODEL_NAME
from lab.peers.shapes import Shape

QUESTION, ANSWER, ANSWER_TOKENS = "The capital of France is", "Paris", 16
_TIMEOUT_S = 120.0
_WARM_UP_SEED = 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of each load: `per_client` requests a client of a closed loop, at least `fewest`."""

    input_len: int = 128
    output_len: int = 64
    per_client: int = 4
    fewest: int = 16
    prefills: int = 16
    alone_s: float = 2.5
    beside_s: float = 7.0
    warm_ups: int = 8
    rest_s: float = 3.0  # after these: a server goes on taking memory for a while after it is ready


def warm_up(running: RunningServer, sizes: Sizes) -> None:
    """Threads, connections and caches come back after a start or a pause. Raises RequestFailed."""

    async def send_some() -> None:
        async with _backend(running) as backend:
            await _closed(backend, sizes.warm_ups, RandomLengths(64, 16), sizes.warm_ups, _WARM_UP_SEED)
            await _closed(backend, 1, RandomLengths(LONG_PROMPT, 4), 1, _WARM_UP_SEED)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(send_some())


def measure_cell(running: RunningServer, cell: Cell, sizes: Sizes) -> Measurement:
    """Raises RequestFailed, Unreachable."""
    before = CpuTime.now()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(_figures(running, cell, sizes))
    return Measurement(cell, {**figures, "steal_share": CpuTime.now().steal_since(before)})


async def _figures(running: RunningServer, cell: Cell, sizes: Sizes) -> Figures:
    seed = zlib.crc32(f"{cell.round} {cell.load}".encode())
    if cell.load in (STREAMS, QUEUED):
        alone_s, in_flight = (sizes.alone_s, 1) if cell.load == STREAMS else (0.0, QUEUED_PROMPTS)
        watched = await watch(partial(_backend, running), seed, alone_s, sizes.beside_s, in_flight)
        return watched.figures()
    async with _backend(running, ignore_eos=cell.load != TEXT) as backend:
        if cell.load == TEXT:
            return await _text(backend)
        if cell.load == PREFILL:
            return await _prefill(backend, sizes.prefills, seed)
        usual = (sizes.input_len, sizes.output_len)
        shape = Shape.of_load(cell.load) or Shape(*usual, clients_of(cell.load))
        count = max(sizes.fewest, sizes.per_client * shape.clients)
        dataset = RandomLengths(shape.input_len, shape.output_len)
        return await _closed(backend, shape.clients, dataset, count, seed)


async def _closed(backend: Backend, clients: int, dataset: RandomLengths, count: int, seed: int) -> Figures:
    run = await drive(backend, Load(max_concurrency=clients), dataset.requests(count, seed), seed)
    figures = measure(run, None, exact_lengths=True).figures
    if not figures["completed"]:
        raise next(one.error for one in run.outcomes if one.error is not None)
    return {**figures, "inexact": inexact(run)}


async def _prefill(backend: Backend, count: int, seed: int) -> Figures:
    """Measure the rate one client sees: the prompt's length over the median time to its first token."""
    figures = await _closed(backend, 1, RandomLengths(LONG_PROMPT, 1), count, seed)
    median = figures["median_ttft_ms"]
    return {**figures, "prefill_throughput": 1000 * LONG_PROMPT / median if median else None}


async def _text(backend: Backend) -> Figures:
    """Check the answer: a fast wrong one is worth little, and the table says so beside the figures."""
    reply = await backend.send(BenchRequest(QUESTION, ANSWER_TOKENS))
    return {"right_answers": float(ANSWER in reply.text)}


def inexact(run: Run) -> float:
    """Answered requests of which the server read or wrote another number of tokens than was asked."""
    return sum(
        one.reply is not None
        and (one.reply.prompt_tokens, one.reply.output_tokens)
        != (one.request.prompt_len, one.request.output_len)
        for one in run.outcomes
    )


@asynccontextmanager
async def _backend(
    running: RunningServer, on_output: Callable[[float], None] | None = None, *, ignore_eos: bool = True
) -> AsyncIterator[Backend]:
    server = running.server
    backend: Backend
    if server.family == "diptych":
        asking = Asking(ignore_eos=ignore_eos, timeout_s=_TIMEOUT_S, on_output=on_output)
        backend = GrpcBackend(running.address, asking)
    else:
        asking = Asking(
            MODEL_NAME,
            ignore_eos,
            timeout_s=_TIMEOUT_S,
            extra_body=server.extra_body,
            on_output=on_output,
        )
        backend = OpenAIBackend(
            f"http://{running.address}",
            "completions",
            asking,
            new_connections=server.family == "llama.cpp",
        )
    try:
        yield backend
    finally:
        await backend.close()
