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
    chunk: int = 16
    """Tokens of a step beside running sequences."""
    idle_chunk: int = 128
    """Tokens of a step while no sequence runs."""


def default_chunks(device_type: str) -> tuple[int, int]:
    """Return the tokens of a step beside running sequences, and of one while no sequence runs."""
    return (16, 128) if device_type == "cpu" else (256, 1024)


LEAST_CHUNK = 4
"""Tokens that a step takes of a prompt however long they take: it would not end else."""
WEIGHT = 0.3
"""Share of the last step in a mean of steps."""


class ChunkBudget:
    """Tokens of a step beside running sequences, by measured times: the step is twice as long at most.

    Where pauses between steps leave more time than that, it may take these.
    """

    def __init__(self, most: int) -> None:
        """Allow at most `most` tokens."""
        self._most = most
        self._plain_s = self._token_s = 0.0

    def record(self, seconds: float, chunk_tokens: int, *, alone: bool = False) -> None:
        """Record a step with so many tokens of prompts, of which it consists where `alone`."""
        if not chunk_tokens:
            self._plain_s = _mean(self._plain_s, seconds)
        elif alone or self._plain_s:
            more = seconds if alone else max(seconds - self._plain_s, 0.0)
            self._token_s = _mean(self._token_s, more / chunk_tokens)

    def tokens(self, slack_s: float) -> int:
        """Return the tokens of the next step, with pauses of `slack_s` seconds between steps."""
        if not self._token_s:
            return self._most
        room = int(max(slack_s, self._plain_s) / self._token_s)
        return min(max(room, LEAST_CHUNK), self._most)


def _mean(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean) if mean else value


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
