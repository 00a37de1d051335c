"""Schedule of prompts that a decode worker computes itself: who asks for blocks, and the chunks of a step.

Pure: plain values in, plain values out. Prompts are in order by priority, then arrival. The budget of a step
is small beside running sequences, which wait for the step's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LocalBounds:
    """The most tokens of prompts that are computed here."""

    short: int = 256
    """New tokens of a prompt while prefill workers are ready; 0 = none is computed here."""
    fallback: int = 2048
    """New tokens of a prompt while none is."""
    chunk: int = 32
    """Tokens of a step beside running sequences."""
    idle_chunk: int = 128
    """Tokens of a step while no sequence runs."""


class QueuedPrompt(NamedTuple):
    """A prompt with `tokens` still to compute; `arrived` identifies it (lower is older)."""

    arrived: int
    tokens: int
    priority: int = 0
    chunk_limit: int | None = None
    """Most tokens of a chunk: logits of every token, where they are wanted, take memory and time."""


def plan_asks(queued: Sequence[QueuedPrompt], holding: Sequence[QueuedPrompt], lookahead: int) -> list[int]:
    """Return which of the `queued` prompts ask for blocks now, by `arrived`.

    They ask while fewer than `lookahead` tokens are held or asked for: a queue of prompts pins no blocks.
    """
    tokens = sum(prompt.tokens for prompt in holding)
    asks = []
    for prompt in _in_order(queued):
        if tokens >= lookahead:
            break
        asks.append(prompt.arrived)
        tokens += prompt.tokens
    return asks


def plan_chunks(granted: Sequence[QueuedPrompt], budget: int) -> list[tuple[int, int]]:
    """Fill a step of at most `budget` tokens; return (arrived, tokens) of each chunk, in order."""
    chunks = []
    left = budget
    for prompt in _in_order(granted):
        if left <= 0:
            break
        tokens = min(prompt.tokens, left)
        if prompt.chunk_limit is not None:
            tokens = min(tokens, prompt.chunk_limit)
        chunks.append((prompt.arrived, tokens))
        left -= tokens
    return chunks


def _in_order(prompts: Sequence[QueuedPrompt]) -> list[QueuedPrompt]:
    return sorted(prompts, key=lambda prompt: (-prompt.priority, prompt.arrived))
