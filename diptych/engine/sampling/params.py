"""Sampling parameters of one request, with the logits processors that they make."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from diptych.engine.sampling.allowed_tokens import AllowedTokens
from diptych.engine.sampling.bad_words import BadWords
from diptych.engine.sampling.frequency_presence import FrequencyPresence
from diptych.engine.sampling.logit_bias import LogitBias
from diptych.engine.sampling.logits_processor import LogitsProcessor
from diptych.engine.sampling.repetition_penalty import RepetitionPenalty
from diptych.parameters import GREEDY_BELOW, OFF, PARAMETERS, Sampling

_HOST_ONLY = tuple((name, off) for name, off in OFF.items() if not PARAMETERS[name].on_device)


@dataclass(frozen=True)
class SamplingParams(Sampling):
    """Resolved values, every one of them validated already; see `diptych.parameters`."""

    logprobs: int | None = None
    """None: tokens come without scores. Else so many alternatives come in each score."""

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def on_device(self) -> bool:
        """True if the samplers of devices have every parameter that is in use."""
        return self.logprobs is None and all(getattr(self, name) == off for name, off in _HOST_ONLY)

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
