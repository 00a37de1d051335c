"""Sampling parameters of one request, with the logits processors that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from diptych.engine.sampling.allowed_tokens import AllowedTokens
from diptych.engine.sampling.bad_words import BadWords
from diptych.engine.sampling.frequency_presence import FrequencyPresence
from diptych.engine.sampling.logit_bias import LogitBias
from diptych.engine.sampling.logits_processor import LogitsProcessor
from diptych.engine.sampling.repetition_penalty import RepetitionPenalty

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32 for ordinary logits."""


@dataclass(frozen=True)
class SamplingParams:
    """Resolved values, every one of them validated already."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty is all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of at least one token; the last of each cannot come right after the others."""
    logprobs: int | None = None
    """None: tokens come without scores. Else so many alternatives come in each score."""

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def logits_processors(self) -> tuple[LogitsProcessor, ...]:
        """Logits processors of this request, in order. Built once: a step only applies them."""
        processors: list[LogitsProcessor] = []
        if self.logit_bias:
            processors.append(LogitBias(self.logit_bias))
        if self.allowed_token_ids:
            processors.append(AllowedTokens(self.allowed_token_ids))
        if self.bad_words:
            processors.append(BadWords(self.bad_words))
        if self.repetition_penalty != 1.0:
            processors.append(RepetitionPenalty(self.repetition_penalty))
        if self.frequency_penalty != 0.0 or self.presence_penalty != 0.0:
            processors.append(FrequencyPresence(self.frequency_penalty, self.presence_penalty))
        return tuple(processors)
