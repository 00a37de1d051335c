"""Times of steps and of runs of steps, looked up instead of computed: a replay asks millions of times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.planner.measured_rates import Measured
from diptych.planner.rates import Rates

_GRID = 512
"""Tokens of context between two computed times; between them they are interpolated."""


@dataclass(frozen=True)
class StepTimes:
    """Times of one worker, in seconds.

    Args:
        rates: measured, or from a card's limits.
        pull_s: of one token's keys and values from a decode worker to a prefill worker.
        handoff_s: between a prompt's last step and its first token.
        prompts_beside, steps_beside: factors on the times of prompts, and of decode steps, while the other
            worker of the same machine computes.
    """

    rates: Rates
    pull_s: float = 0.0
    handoff_s: float = 0.0
    prompts_beside: float = 1.0
    steps_beside: float = 1.0
    _table: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)

    @classmethod
    def of_measured(cls, rates: Measured) -> StepTimes:
        """Return the times of a machine that was measured: the way between its workers is in its overhead."""
        return cls(
            rates,
            handoff_s=rates.overhead_s,
            prompts_beside=rates.prompts_beside,
            steps_beside=rates.steps_beside,
        )

    @property
    def share_cores(self) -> bool:
        """Return whether a prefill and a decode worker slow one another down."""
        return self.prompts_beside != 1.0 or self.steps_beside != 1.0

    def step_s(self, batch: int, context: float) -> float:
        """Return the time of a decode step of `batch` streams with `context` tokens each on average."""
        low = int(context // _GRID)
        left = self._at(batch, low)
        return left + (self._at(batch, low + 1) - left) * (context / _GRID - low)

    def _at(self, batch: int, index: int) -> float:
        found = self._table.get((batch, index))
        if found is None:
            found = self._table[batch, index] = self.rates.step_s(batch, index * _GRID)
        return found

    def run_s(self, batch: int, context: float, steps: int) -> float:
        """Return the time of `steps` decode steps, over which each context grows by a token a step."""
        return steps * self.step_s(batch, context + (steps - 1) / 2)

    def steps_until(self, batch: int, context: float, seconds: float, most: int) -> int:
        """Return the steps, of `most`, after which `seconds` have passed; at least one."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.run_s(batch, context, middle) < seconds:
                low = middle + 1
            else:
                high = middle
        return low

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the time of a prefill step of chunks of (tokens, tokens before them)."""
        total = sum(tokens for tokens, _ in chunks)
        # Attention costs by the keys that a token has before it; the mean is what one long chunk would have.
        mean = sum(tokens * (before + tokens / 2) for tokens, before in chunks) / total
        return self.rates.prefill_s(total, max(mean - total / 2, 0.0))

    def chunk_s(self, chunks: Sequence[tuple[int, int]], *, beside: bool) -> float:
        """Return what chunks of (tokens, tokens before them) add to a step; alone if not `beside` streams.

        Beside them the step reads the weights anyway.
        """
        if not chunks:
            return 0.0
        fixed_s = self.rates.prefill_s(0, 0) if beside else 0.0
        return max(self.prefill_s(chunks) - fixed_s, 0.0)

    @property
    def pull_cost(self) -> float | None:
        """Cost of pulling a token, in tokens to compute; None where nothing has to be pulled."""
        token_s = self.rates.prefill_s(2048, 0) / 2048
        return self.pull_s / token_s if self.pull_s and math.isfinite(self.pull_s) else None
