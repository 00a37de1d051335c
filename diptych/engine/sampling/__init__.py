"""Sampling of tokens from logits: logits processors, truncation, and random numbers by seed and counter.

A row passes these stations in this order; one that its request does not ask for is not entered:

    logit bias             added before everything else
    allowed token ids      all others are forbidden
    bad words              the last token of a sequence whose others have just come is forbidden
    repetition penalty     prompt and output; as in transformers
    frequency, presence    output only; as in vLLM (transformers has none)
    suppression            stop tokens, while min_tokens is not reached
    mask                   what a grammar lets come now
    truncation             temperature, top-k and what else keeps the likely tokens only
    the draw

Forbidden is minus infinity, which no later station lifts. Log-probabilities (`TokenLogprob`) are those of the
model itself, before any station.

Sampling is counter-based: its one random number is a hash of (seed, index of the output token). A request
that is resumed elsewhere after any fault continues with the same tokens, and a row never depends on the batch
around it.
"""

from diptych.engine.sampling.random import choice_seed, distribution, uniform
from diptych.engine.sampling.sample import candidates, sample
from diptych.engine.sampling.sample_row import (
    Candidate,
    Sampled,
    SampleFailure,
    SampleRow,
    SamplingParams,
    TokenLogprob,
    TokenMask,
)
from diptych.engine.sampling.topk import token_logprobs, top_logprobs

__all__ = [
    "Candidate",
    "SampleFailure",
    "SampleRow",
    "Sampled",
    "SamplingParams",
    "TokenLogprob",
    "TokenMask",
    "candidates",
    "choice_seed",
    "distribution",
    "sample",
    "token_logprobs",
    "top_logprobs",
    "uniform",
]
