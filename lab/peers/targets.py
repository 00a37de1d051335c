"""Targets of Diptych beside its peers, and whether they are met.

"Best" of the peers is taken figure by figure, whichever server and precision it comes from. Ours is one
server for all rows, but for those that say bf16; each of ours is judged by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lab.peers.cells import PREFILL, QUEUED, START, STREAMS, closed_loop
from lab.peers.servers import Family, Server
from lab.peers.summary import Best, Summary

Direction = Literal["at least", "at most"]

_OUT, _TTFT, _ITL = "output_throughput", "median_ttft_ms", "median_itl_ms"
_P99_BESIDE = "p99_itl_beside_ms"


@dataclass(frozen=True)
class Target:
    """`ours` over `theirs` should be `direction` `bound`; None where something was not measured."""

    what: str
    direction: Direction
    bound: float
    ours: Best | None
    theirs: Best | None

    @property
    def ratio(self) -> float | None:
        if self.ours is None or self.theirs is None or not self.theirs.value:
            return None
        return self.ours.value / self.theirs.value

    @property
    def met(self) -> bool | None:
        if self.ratio is None:
            return None
        return self.ratio >= self.bound if self.direction == "at least" else self.ratio <= self.bound


@dataclass(frozen=True)
class Limits:
    """Limits of the machine, measured in the same run, and the cost of a prompt."""

    bf16_flops: float  # a second, all threads
    prompt_flops: float  # of one 512-token prompt

    @property
    def prompts_per_s(self) -> float:
        return self.bf16_flops / self.prompt_flops


def our_paths(servers: Sequence[Server], summary: Summary) -> list[str]:
    """Return our paths that were measured at sixteen clients, by tokens a second, the fastest first."""
    rates = {name: summary.median(name, closed_loop(16), _OUT) for name in _names(servers, "diptych")}
    return sorted((n for n, rate in rates.items() if rate), key=lambda n: rates[n] or 0.0, reverse=True)


def targets(servers: Sequence[Server], summary: Summary, limits: Limits | None, path: str) -> list[Target]:
    """Return the targets in the order in which they were set. `path` names the one of ours that is judged."""
    return [
        *_sixteen(servers, summary, path),
        *_one_and_eight(servers, summary, path),
        *_prefill(servers, summary, limits, path),
        *_streams(servers, summary, path),
        *_handoff(summary, path),
        *_start(summary, path),
    ]


def _sixteen(servers: Sequence[Server], summary: Summary, path: str) -> Iterator[Target]:
    load = closed_loop(16)
    vllm, llama = _names(servers, "vllm"), _names(servers, "llama.cpp")
    ours = _of(summary, path, load, _OUT)
    yield Target(
        "C=16 tokens/s, ours / vLLM's best", "at least", 1.5, ours, summary.highest(vllm, load, _OUT)
    )
    yield Target(
        "C=16 tokens/s, ours / llama.cpp's best", "at least", 2.3, ours, summary.highest(llama, load, _OUT)
    )
    yield Target(
        "C=16 tokens/s in bf16, ours / vLLM's",
        "at least",
        1.15,
        _of(summary, "diptych-bf16", load, _OUT),
        _of(summary, "vllm-bf16", load, _OUT),
    )
    better = summary.lowest([*vllm, *llama], load, _TTFT)
    yield Target(
        "C=16 TTFT p50, ours / the better peer's", "at most", 0.7, _of(summary, path, load, _TTFT), better
    )
    itl = summary.lowest(vllm, load, _ITL)
    yield Target("C=16 ITL p50, ours / vLLM's", "at most", 0.7, _of(summary, path, load, _ITL), itl)


def _one_and_eight(servers: Sequence[Server], summary: Summary, path: str) -> Iterator[Target]:
    one, eight = closed_loop(1), closed_loop(8)
    vllm, llama = _names(servers, "vllm"), _names(servers, "llama.cpp")
    itl = _of(summary, path, one, _ITL)
    q4_0 = _of(summary, "llama.cpp-Q4_0", one, _ITL)
    yield Target("C=1 ITL p50, ours / llama.cpp Q4_0's", "at most", 0.7, itl, q4_0)
    yield Target("C=1 ITL p50, ours / vLLM's", "at most", 0.25, itl, summary.lowest(vllm, one, _ITL))
    better = summary.lowest([*vllm, *llama], one, _TTFT)
    yield Target(
        "C=1 TTFT p50, ours / the better peer's", "at most", 0.65, _of(summary, path, one, _TTFT), better
    )
    most = summary.highest([*vllm, *llama], eight, _OUT)
    yield Target(
        "C=8 tokens/s, ours / the better peer's", "at least", 1.8, _of(summary, path, eight, _OUT), most
    )


def _prefill(
    servers: Sequence[Server], summary: Summary, limits: Limits | None, path: str
) -> Iterator[Target]:
    rate = "prefill_throughput"
    bf16 = _of(summary, "diptych-bf16", PREFILL, rate)
    possible = None if limits is None else Best("bf16 peak", 512 * limits.prompts_per_s)
    yield Target("prefill of 512 in bf16, ours / the arithmetic peak", "at least", 0.7, bf16, possible)
    theirs = summary.highest(_names(servers, "vllm"), PREFILL, rate)
    ours = _of(summary, path, PREFILL, rate)
    yield Target("prefill of 512, ours / vLLM's", "at least", 1.3, ours, theirs)


def _streams(servers: Sequence[Server], summary: Summary, path: str) -> Iterator[Target]:
    fastest = summary.highest(_names(servers, "vllm"), closed_loop(16), _OUT)
    for load, beside in ((STREAMS, "prompts, one at a time"), (QUEUED, "prompts that queue")):
        yield Target(
            f"ITL p99 of 8 streams beside {beside}, ours / vLLM's at its best throughput",
            "at most",
            0.05,
            _of(summary, path, load, _P99_BESIDE),
            None if fastest is None else _of(summary, fastest.server, load, _P99_BESIDE),
        )


def _handoff(summary: Summary, path: str) -> Iterator[Target]:
    for figure, limit in (("median", 3.0), ("p99", 10.0)):
        ours = _of(summary, path, closed_loop(16), f"{figure}_handoff_ms")
        what = f"C=16 handoff {figure} of ours / {limit:.0f} ms"
        yield Target(what, "at most", 1.0, ours, Best("limit", limit))


def _start(summary: Summary, path: str) -> Iterator[Target]:
    ours = _of(summary, path, START, "start_s")
    yield Target("start-up of ours / 10 s", "at most", 1.0, ours, Best("limit", 10.0))


def _names(servers: Sequence[Server], family: Family) -> list[str]:
    return [one.name for one in servers if one.family == family]


def _of(summary: Summary, server: str, load: str, figure: str) -> Best | None:
    value = summary.median(server, load, figure)
    return None if value is None else Best(server, value)
