"""Times of prompts and decode steps: from a card's limits, or from what was measured.

A step takes as long as its bytes or its operations, whichever is more (the roofline: Williams et al. 2009),
divided by the share of the limit that is reached. With several cards a worker, weights and KV are read by
all at once, and each layer adds two all-reduces (Shoeybi et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from diptych.planner.hardware import Accelerator
from diptych.planner.model_costs import ModelCosts

DECODE_EFFICIENCY: Final = 0.66
"""Share of the stated bandwidth that a decode step reaches: 0.74 of the 4.25 TB/s that a copy reaches on an
H200 (lab/results/h200/2026-11-27-gpu.md).
"""
PREFILL_EFFICIENCY: Final = 0.57
"""Share of the stated operations: 0.71 of the 799 TFLOP/s that a product reaches there."""
_ALL_REDUCE_S: Final = 10e-6
"""Latency of one all-reduce between cards of a host."""
_ACTIVATION_BYTES: Final = 2


class Rates(Protocol):
    """Times of one worker, in seconds."""

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        """Return the time of a prompt of `new_tokens` after `cached_tokens` that are not computed."""
        ...

    def step_s(self, batch: float, context: float) -> float:
        """Return the time of a decode step of `batch` streams of `context` tokens each."""
        ...


@dataclass(frozen=True)
class Roofline:
    """Rates from the limits of `cards` equal cards that make one worker."""

    costs: ModelCosts
    card: Accelerator
    cards: int = 1
    decode_efficiency: float = DECODE_EFFICIENCY
    prefill_efficiency: float = PREFILL_EFFICIENCY

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        keys = self.costs.attended(cached_tokens + new_tokens / 2)
        flops = new_tokens * (2 * self.costs.active_parameters + self.costs.pair_flops * keys)
        computing = flops / (self.card.flops_of(self.costs.operands) * self.cards * self.prefill_efficiency)
        reading = self.costs.weight_bytes / (self.card.bandwidth * self.cards * self.decode_efficiency)
        return max(computing, reading) + self._exchange_s(new_tokens)

    def step_s(self, batch: float, context: float) -> float:
        keys = self.costs.attended(context)
        kv = batch * keys * self.costs.kv_bytes
        reading = (self.costs.step_bytes(math.ceil(batch)) + kv) / (self.card.bandwidth * self.cards)
        flops = batch * (2 * self.costs.active_parameters + self.costs.pair_flops * keys)
        computing = flops / (self.card.flops_of(self.costs.operands) * self.cards)
        limits = (reading / self.decode_efficiency, computing / self.prefill_efficiency)
        return max(limits) + self._exchange_s(batch)

    def _exchange_s(self, tokens: float) -> float:
        if self.cards == 1:
            return 0.0
        # A ring sends each byte 2 (n - 1) / n times over one link (Thakur et al. 2005).
        sent = 2 * (self.cards - 1) / self.cards * tokens * self.costs.hidden_size * _ACTIVATION_BYTES
        return 2 * self.costs.layers * (_ALL_REDUCE_S + sent / self.card.link)


@dataclass(frozen=True)
class PhaseRates:
    """Rates of workers of two kinds: prompts by one, steps by the other."""

    prefill: Rates
    decode: Rates

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        return self.prefill.prefill_s(new_tokens, cached_tokens)

    def step_s(self, batch: float, context: float) -> float:
        return self.decode.step_s(batch, context)


class BadMeasurements(ValueError):
    """Results that no rates can be read from. The message says what is missing."""


@dataclass(frozen=True)
class Measured:
    """Rates fitted to loads of `diptych bench`: straight lines through what clients saw.

    A prompt takes `prefill_base + prefill_per_token * new`, a step `step_base + step_per_stream * batch`.
    Both contain whatever phases take from one another where they share a machine.
    """

    prefill_base: float
    prefill_per_token: float
    step_base: float
    step_per_stream: float
    prefill_beside: float = 1.0
    """Factor on a prompt's time while a decode worker computes: above 1 where both share a machine."""

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        return self.prefill_base + self.prefill_per_token * new_tokens

    def step_s(self, batch: float, context: float) -> float:
        return self.step_base + self.step_per_stream * batch

    @classmethod
    def of_results(cls, results: Sequence[Mapping[str, Any]]) -> Measured:
        """Fit loads of a file that `diptych bench --save-result` wrote. Raises BadMeasurements."""
        loads = [_load(number, one) for number, one in enumerate(results)]
        if not loads:
            raise BadMeasurements("the file holds no load")
        alone = min(loads, key=lambda load: load.streams)
        lone = [load for load in loads if load.streams == alone.streams]
        base, per_token = _line([(load.input, load.ttft_s) for load in lone], through_zero=True)
        step, per_stream = _line([(load.streams, load.tpot_s) for load in loads], through_zero=False)
        return cls(base, per_token, step, per_stream, _prefill_beside(lone, loads))


@dataclass(frozen=True)
class _Load:
    streams: float
    input: float
    ttft_s: float
    tpot_s: float
    prefill_s: float | None
    """The server's own time of a prompt's computation; None where it reports none."""


def _prefill_beside(lone: Sequence[_Load], loads: Sequence[_Load]) -> float:
    """Return how much longer a prompt takes at the fewest streams above a lone one, by the server's times.

    More streams make prompts wait for one another, which the times contain as well.
    """
    known = [(load.input, load.prefill_s) for load in lone if load.prefill_s is not None]
    others = [load for load in loads if load.prefill_s is not None and load.streams > lone[0].streams]
    if not known or not others:
        return 1.0
    fewest = min(others, key=lambda load: load.streams)
    base, per_token = _line(known, through_zero=True)
    return max((fewest.prefill_s or 0.0) / (base + per_token * fewest.input), 1.0)


def _load(number: int, result: Mapping[str, Any]) -> _Load:
    try:
        prefill_ms = result.get("median_server_prefill_ms")
        completed = float(result["completed"])
        return _Load(
            streams=float(result["max_concurrency"] or result["concurrency"]),
            input=float(result["total_input_tokens"]) / completed,
            ttft_s=float(result["median_ttft_ms"]) / 1000,
            tpot_s=float(result["median_tpot_ms"]) / 1000,
            prefill_s=None if prefill_ms is None else float(prefill_ms) / 1000,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadMeasurements(f"load {number} of the file has no usable {error}") from error


def _line(points: Sequence[tuple[float, float]], *, through_zero: bool) -> tuple[float, float]:
    """Return (value at 0, slope) of least squares; of a single abscissa, one of the two is 0."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return (0.0, mean_y / mean_x) if through_zero else (mean_y, 0.0)
    slope = max(sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 0.0)
    return max(mean_y - slope * mean_x, 0.0), slope
