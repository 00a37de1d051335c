"""Streams beside which a test does its worst: what others are doing must not be felt in them.

They run in a process of their own (this file): in the test's they would wait for its interpreter lock, and
that wait would be taken for the server's.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time

from diptych.client import AsyncClient
from tests.end_to_end.stack import Stack

LEAST_GAPS = 100


class Canary:
    """One stream after another, and the time between their tokens. Leaving it fails if one of them did."""

    def __init__(self, stack: Stack, model: str) -> None:
        self._command = [sys.executable, "-m", __name__, stack.address, model]
        self._gaps: list[float] = []

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles(self._gaps, n=100)[98] * 1e3

    @property
    def longest_ms(self) -> float:
        return max(self._gaps) * 1e3

    def __enter__(self) -> Canary:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "sings\n", "the canary did not begin"
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._process.communicate("enough\n")
        assert self._process.returncode == 0, "a stream of the canary failed: see its traceback above"
        self._gaps = json.loads(output)


async def _sing(address: str, model: str) -> list[float]:
    """Until a line, or the end, comes on standard input."""
    enough = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    gaps: list[float] = []
    async with AsyncClient(address, model=model) as client:
        while not enough.done() or len(gaps) < LEAST_GAPS:
            last: float | None = None
            stream = client.stream("canary", max_tokens=200, ignore_eos=True, temperature=0.0)
            async with stream:
                async for _ in stream:
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    elif not gaps:
                        print("sings", flush=True)
                    last = now
    return gaps


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_sing(*sys.argv[1:]))))
