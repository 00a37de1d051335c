"""The fleet that a load needs: prefill and decode workers, the streams that fit, and what they leave idle.

Prefill workers are a queue with Poisson arrivals, one prompt at a time each: Erlang's C gives the mean wait
with exponential times, and times that hardly vary halve it (Lee and Longton 1959). Decode workers hold
streams: Little's law (1961) gives how many at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from diptych.planner.model_costs import ModelCosts
from diptych.planner.rates import Rates

MEMORY_USED: Final = 0.9
"""Share of a card's memory for weights and KV; the rest is for activations, graphs and the library."""
BUSY: Final = 0.85
"""Share of its streams up to which a decode worker is filled, so that arrivals in a row find room."""
MOST_WORKERS: Final = 4096
PAGES: Final = 2
"""Recurrent states that a stream keeps: those of its last token, and of the last border of blocks."""


class DoesNotFit(ValueError):
    """A model or a service level that no number of these workers reaches. The message says why."""


@dataclass(frozen=True)
class Demand:
    """A load and its service level. Tokens are means a request."""

    rate: float
    """Requests a second."""
    input_tokens: float
    output_tokens: float
    prefix: float = 0.0
    """Share of input tokens that are cached."""
    ttft_s: float = math.inf
    """Mean time to the first token that is wanted."""
    tpot_s: float = math.inf
    """Time between tokens that is wanted."""
    handoff_s: float = 0.0

    @property
    def new_tokens(self) -> float:
        """Input tokens that are computed."""
        return max(self.input_tokens * (1 - self.prefix), 1.0)

    @property
    def mean_context(self) -> float:
        """Tokens that a stream has on average while it is decoded."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class Worker:
    """Memory of one worker."""

    memory: float
    """Bytes of all its cards."""
    weight_bytes: float
    kv_bytes: float
    """Bytes of a token's keys and values."""
    stream_bytes: float = 0.0
    """Bytes of a stream whatever its length: its recurrent states, and those that a step holds of it."""

    @property
    def free_bytes(self) -> float:
        """Bytes for keys and values."""
        return self.memory * MEMORY_USED - self.weight_bytes

    def check_weights(self) -> None:
        """Raise DoesNotFit where the weights leave no memory."""
        if self.free_bytes <= 0:
            raise DoesNotFit(
                f"weights of {self.weight_bytes / 1e9:.1f} GB do not fit into {MEMORY_USED:.0%} of "
                f"{self.memory / 1e9:.0f} GB: more cards a worker, a larger card or fewer bits"
            )

    def streams(self, tokens: float) -> int:
        """Return the streams of `tokens` each that fit. Raises DoesNotFit for none."""
        self.check_weights()
        needed = tokens * self.kv_bytes + self.stream_bytes
        fits = int(self.free_bytes / needed)
        if fits < 1:
            what = "keys and values" if not self.stream_bytes else "keys, values and recurrent states"
            raise DoesNotFit(
                f"one stream of {tokens:.0f} tokens needs {needed / 1e9:.1f} GB of {what}, and "
                f"{self.free_bytes / 1e9:.1f} GB are left beside the weights"
            )
        return fits


@dataclass(frozen=True)
class Fleet:
    """Workers for a load, and what they do then."""

    prefill_workers: int
    decode_workers: int
    prefill_s: float
    wait_s: float
    """Mean wait for a prefill worker."""
    step_s: float
    """Time between tokens at this load."""
    ttft_s: float
    streams_that_fit: int
    """Streams that one decode worker's memory holds."""
    streams_at_most: int
    """Streams that one decode worker serves, by memory and by the time between tokens."""
    streams: float
    """Mean streams of one decode worker at this load."""
    prefill_busy: float
    """Share of their time that prefill workers compute."""
    decode_busy: float
    """Share of the possible streams that decode workers have."""
    rate_at_most: float
    """Requests a second that these workers can serve within the service level."""


def worker_of(costs: ModelCosts, memory: float, draft: ModelCosts | None = None) -> Worker:
    """Return the memory of a worker with `memory` bytes that holds the model, and a draft model if given."""
    models = (costs,) if draft is None else (costs, draft)
    return Worker(
        memory,
        sum(one.weight_bytes for one in models),
        sum(one.kv_bytes for one in models),
        sum(PAGES * one.state_bytes + one.held_bytes for one in models),
    )


def size_fleet(demand: Demand, worker: Worker, rates: Rates) -> Fleet:
    """Return the smallest fleet that serves `demand`. Raises DoesNotFit, naming the limit out of reach."""
    fits = worker.streams(demand.input_tokens + demand.output_tokens)
    most = _streams_within(demand, fits, rates)
    full_step = rates.step_s(most, demand.mean_context)
    decode_rate = most * BUSY / (demand.output_tokens * full_step)
    decode_workers = max(math.ceil(demand.rate / decode_rate), 1)
    streams, step = _streams_at(demand, decode_workers, rates)
    prefill = rates.prefill_s(demand.new_tokens, demand.input_tokens - demand.new_tokens)
    fixed = prefill + demand.handoff_s + step
    if fixed > demand.ttft_s:
        raise DoesNotFit(
            f"a first token takes {1000 * fixed:.3g} ms without any wait, and {1000 * demand.ttft_s:.3g} ms "
            "are wanted: more cards a worker, a faster card, or more of the prompt cached"
        )
    prefill_workers = _prefill_workers(demand, prefill, demand.ttft_s - fixed)
    wait = mean_wait_s(demand.rate, prefill, prefill_workers)
    return Fleet(
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        prefill_s=prefill,
        wait_s=wait,
        step_s=step,
        ttft_s=fixed + wait,
        streams_that_fit=fits,
        streams_at_most=most,
        streams=streams,
        prefill_busy=demand.rate * prefill / prefill_workers,
        decode_busy=streams / most,
        rate_at_most=min(
            decode_workers * decode_rate,
            _most_rate(prefill, prefill_workers, demand.ttft_s - fixed),
        ),
    )


def mean_wait_s(rate: float, service_s: float, workers: int) -> float:
    """Return the mean wait in a queue with Poisson arrivals and times that do not vary; inf if it grows."""
    load = rate * service_s
    if load >= workers:
        return math.inf
    blocked = 1.0  # Erlang's B, by its recursion, then C
    for number in range(1, workers + 1):
        blocked = load * blocked / (number + load * blocked)
    waits = blocked / (1 - load / workers * (1 - blocked))
    return waits * service_s / (workers - load) / 2


def _streams_within(demand: Demand, fits: int, rates: Rates) -> int:
    """Return the most streams, of those that fit, with the time between tokens that is wanted."""
    if (one := rates.step_s(1, demand.mean_context)) > demand.tpot_s:
        raise DoesNotFit(
            f"a lone stream has {1000 * one:.1f} ms between tokens, and {1000 * demand.tpot_s:.1f} ms are "
            "wanted: more cards a worker, a card with more bandwidth, or fewer bits"
        )
    low, high = 1, fits
    while low < high:
        middle = (low + high + 1) // 2
        if rates.step_s(middle, demand.mean_context) <= demand.tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


def _streams_at(demand: Demand, workers: int, rates: Rates) -> tuple[float, float]:
    """Return a worker's mean streams and its step: more streams make a step longer, and so more streams."""
    streams, step = 0.0, rates.step_s(1, demand.mean_context)
    for _ in range(200):
        following = demand.rate / workers * demand.output_tokens * step
        step = rates.step_s(max(following, 1.0), demand.mean_context)
        if abs(following - streams) < 1e-6 * max(streams, 1.0):
            break
        streams = following
    return streams, step


def _prefill_workers(demand: Demand, prefill_s: float, patience_s: float) -> int:
    for workers in range(max(math.ceil(demand.rate * prefill_s), 1), MOST_WORKERS + 1):
        if mean_wait_s(demand.rate, prefill_s, workers) <= min(patience_s, 1e9):
            return workers
    raise DoesNotFit(f"more than {MOST_WORKERS} prefill workers would be needed")


def _most_rate(service_s: float, workers: int, patience_s: float) -> float:
    """Return the arrivals a second at which the mean wait reaches `patience_s`."""
    low, high = 0.0, workers / service_s
    for _ in range(60):
        middle = (low + high) / 2
        if mean_wait_s(middle, service_s, workers) <= min(patience_s, 1e9):
            low = middle
        else:
            high = middle
    return low
