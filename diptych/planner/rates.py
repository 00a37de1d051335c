"""Times of prompts and decode steps from a card's limits (measured ones: measured_rates.py).

A step takes as long as its bytes or its operations, whichever is more (the roofline: Williams et al. 2009),
divided by the share of the limit that is reached. With several cards a worker, weights and KV are read by
all at once, and each layer adds two all-reduces (Shoeybi et al. 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

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
        # A state is read and written, whatever the context.
        kv = batch * (keys * self.costs.kv_bytes + 2 * self.costs.state_bytes)
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
