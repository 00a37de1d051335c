"""Bytes and operations of a step by arithmetic: what a GPU has to read and multiply, whatever computes it.

Over the time of steps they are the achieved bandwidth and rate of operations. Only what must be is counted:
each weight once a step, each visible key and value once a sequence, two operations for a product and its sum.
Which experts rows choose is known on the device alone: as many are counted as rows that choose evenly want,
`E (1 - (1 - K / E) ** T)` of E for T tokens of K each. Rows that agree read less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.models.shape import ModelShape


@dataclass(frozen=True)
class StepWork:
    """Bytes read and operations of one step."""

    read_bytes: int
    operations: int


class WorkArithmetic:
    """Work of the steps of one model."""

    def __init__(self, shape: ModelShape, layout: KVLayout, weight_bytes: int, expert_bytes: int = 0) -> None:
        """Count for a model without latents whose weights are `weight_bytes` where it computes.

        `expert_bytes` of them are those of the experts that rows choose among.
        """
        self._common_bytes, self._expert_bytes = weight_bytes - expert_bytes, expert_bytes
        experts = shape.experts
        self._passed_over = 0.0 if experts is None else 1 - experts.experts_per_token / experts.num_experts
        self._elements = _elements_a_token(shape)
        self._head = shape.vocab_size * shape.hidden_size
        self._kept = 2 * shape.num_kv_heads * shape.head_dim * layout.dtype.itemsize
        self._scores = 4 * shape.num_heads * shape.head_dim
        self._windows = Counter(shape.windows)

    def of(self, sequences: Sequence[SequenceStep]) -> StepWork:
        """Return the work of a step."""
        tokens = sum(len(step.token_ids) for step in sequences)
        rows = sum(step.logit_rows for step in sequences)
        operations = 2 * (tokens * self._elements + rows * self._head)
        read = self._common_bytes + round(self._expert_bytes * (1 - self._passed_over**tokens))
        for window, layers in self._windows.items():
            for step in sequences:
                count, end = len(step.token_ids), step.start + len(step.token_ids)
                operations += layers * self._scores * _pairs(step.start, count, window)
                seen = end if window is None else min(end, window + count - 1)
                read += layers * self._kept * seen
        return StepWork(read, operations)


def _elements_a_token(shape: ModelShape) -> int:
    """Return the weights that a token is multiplied with, but for the output matrix."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * queries + 2 * keys)
    wide = (3 if shape.gated else 2) * shape.hidden_size
    routed = 0
    if (experts := shape.experts) is not None:
        inner = experts.experts_per_token * experts.intermediate_size + experts.shared_size
        routed = wide * inner + shape.hidden_size * experts.num_experts
    dense = wide * shape.intermediate_size
    return sum(attention + (routed if layer.experts else dense) for layer in shape.layers)


def _pairs(start: int, count: int, window: int | None) -> int:
    """Return how many keys `count` tokens from position `start` on see together."""
    if window is None:
        return count * start + count * (count + 1) // 2
    growing = max(0, min(count, window - start))  # tokens that see all before them
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window
