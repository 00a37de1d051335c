"""APIs of one gateway by turns: tokens a second, CPU time a token, and the pace of streams."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.bench.backends.grpc import GrpcBackend
from diptych.bench.backends.kserve import KServeBackend
from diptych.bench.backends.openai_http import OpenAIBackend
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.cpu_time import cpu_s
from diptych.bench.figures import percentile
from diptych.bench.request import BenchRequest
from lab.costs.gateway.systems import Target

PROMPT_TOKENS = 32
TOKEN_IDS = range(1000, 40_000)
WARM_UP_TOKENS = 16
IDLE_S = 2.0

APIS: dict[str, Callable[[Target], Any]] = {
    "grpc": lambda target: GrpcBackend(f"127.0.0.1:{target.grpc_port}", Asking()),
    "kserve": lambda target: KServeBackend(f"127.0.0.1:{target.grpc_port}", Asking()),
    "openai": lambda target: OpenAIBackend(f"http://127.0.0.1:{target.http_port}", "completions", Asking()),
}


@dataclass(frozen=True)
class Sample:
    """Figures of one round of one API."""

    api: str
    tokens_per_s: float
    cpu_us_per_token: float  # of the gateway's process
    itl_p50_ms: float
    itl_p99_ms: float


async def by_turns(
    target: Target, apis: Sequence[str], *, streams: int, tokens: int, rounds: int
) -> list[Sample]:
    """Measure ``rounds`` of each API, interleaved, so that the machine's drift meets all alike."""
    backends = {api: APIS[api](target) for api in apis}
    try:
        for backend in backends.values():
            await _answers(backend, _requests("warm-up", streams, WARM_UP_TOKENS))
        before = cpu_s(target.pid)
        await asyncio.sleep(IDLE_S)
        idle_share = (cpu_s(target.pid) - before) / IDLE_S
        return [
            await _sample(api, backends[api], target.pid, idle_share, _requests(f"{api}{n}", streams, tokens))
            for n in range(rounds)
            for api in apis
        ]
    finally:
        for backend in backends.values():
            await backend.close()


async def _sample(
    api: str, backend: Any, pid: int, idle_share: float, requests: Sequence[BenchRequest]
) -> Sample:
    began, used = time.monotonic(), cpu_s(pid)
    replies = await _answers(backend, requests)
    wall, used = time.monotonic() - began, cpu_s(pid) - used
    count = sum(request.output_len for request in requests)
    gaps = sorted(
        later - earlier for reply in replies for earlier, later in itertools.pairwise(reply.arrivals)
    )
    return Sample(
        api,
        count / wall,
        (used - idle_share * wall) / count * 1e6,
        percentile(gaps, 50) * 1e3,
        percentile(gaps, 99) * 1e3,
    )


async def _answers(backend: Any, requests: Sequence[BenchRequest]) -> list[Any]:
    """Send all requests at once. Raises RuntimeError for an answer of another length than was asked for."""
    replies = await asyncio.gather(*(backend.send(request) for request in requests))
    for request, reply in zip(requests, replies, strict=True):
        if reply.output_tokens != request.output_len:
            raise RuntimeError(f"{reply.output_tokens} tokens came, and not {request.output_len}")
    return replies


def _requests(seed: str, streams: int, tokens: int) -> list[BenchRequest]:
    """Make prompts of their own for each API and round: none finds another's prefix in the cache."""
    rng = random.Random(seed)
    return [BenchRequest(tuple(rng.choices(TOKEN_IDS, k=PROMPT_TOKENS)), tokens) for _ in range(streams)]
