"""Input and output of sampling for one row of logits, and the sampling parameters of its request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from diptych.engine.sampling.allowed_tokens import AllowedTokens
from diptych.engine.sampling.bad_words import BadWords
from diptych.engine.sampling.frequency_presence import FrequencyPresence
from diptych.engine.sampling.logit_bias import LogitBias
from diptych.engine.sampling.logits_processor import LogitsProcessor, Scores
from diptych.engine.sampling.repetition_penalty import RepetitionPenalty
from diptych.parameters import GREEDY_BELOW, OFF, PARAMETERS, Sampling


class TokenMask(Protocol):
    """Mask of the tokens that may come now, by knowledge that is not the engine's: the state of a grammar."""

    def apply(self, scores: Scores) -> None:
        """Set what must not come to minus infinity, in place. `scores` is float32 `[vocab]`."""


@dataclass(frozen=True)
class SampleRow:
    """Parameters and tokens by which one row of logits is sampled."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Tokens emitted so far; their number is the counter of the draw."""
    suppress: Sequence[int] = ()
    """Tokens that must not come now (stop tokens while min_tokens is not reached)."""
    mask: TokenMask | None = None

    @property
    def ruled(self) -> bool:
        """True where a logits processor, suppression or a mask changes the logits."""
        return bool(self.params.logits_processors) or bool(self.suppress) or self.mask is not None


class TokenLogprob(NamedTuple):
    """Log-probability of a token by the model itself: before biases, penalties, masks and temperature."""

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 is the likeliest; tokens of the same probability share a rank."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log-probabilities, likeliest first."""


@dataclass(frozen=True)
class Sampled:
    """The token of a row; its score if the row's parameters ask for scores."""

    token_id: int
    score: TokenLogprob | None = None


class Candidate(NamedTuple):
    """A token that a beam may go on with."""

    token_id: int
    logprob: float
    """Log-probability after the logits processors: what the score of the beam grows by."""
    score: TokenLogprob | None = None
    """Scores, if the row's parameters ask for them."""


@dataclass(frozen=True)
class SampleFailure:
    """The row has no token to give: its logits are NaN or infinite, or everything is forbidden."""

    reason: str
    by_request: bool = False
    """True where the request's own parameters leave no token."""


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
