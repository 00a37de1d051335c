"""Sampling parameters of one request, with the logits processors that they make."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from diptych.engine.sampling.allowed_tokens import AllowedTokens
from diptych.engine.sampling.bad_words import BadWords
from diptych.engine.sampling.frequency_presence import FrequencyPresence
from diptych.engine.sampling.logit_bias import LogitBias
from diptych.engine.sampling.logits_processor import Rule
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
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def on_device(self) -> bool:
        """Whether the samplers of devices have every parameter that is in use."""
        return self.logprobs is None and all(getattr(self, name) == off for name, off in _HOST_ONLY)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Logits processors of this request, in order. Built once: a step only applies them."""
        rules: list[Rule] = []
        if self.logit_bias:
            rules.append(LogitBias(self.logit_bias))
        if self.allowed_token_ids:
            rules.append(AllowedTokens(self.allowed_token_ids))
        if self.bad_words:
            rules.append(BadWords(self.bad_words))
        if self.repetition_penalty != 1.0:
            rules.append(RepetitionPenalty(self.repetition_penalty))
        if self.frequency_penalty != 0.0 or self.presence_penalty != 0.0:
            rules.append(FrequencyPresence(self.frequency_penalty, self.presence_penalty))
        return tuple(rules)
