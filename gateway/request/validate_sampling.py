"""Checks of ``sampling``: numbers in range, absent ones from the model's defaults, and lists of tokens.

Ranges and lengths are those of `diptych.parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

from diptych.parameters import GREEDY_BELOW, OFF, PARAMETERS, SAMPLING_NUMBERS, Sampling
from diptych.runtime.errors import InvalidParameter
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from gateway.model.served_model import SamplingDefaults
from gateway.request.field_checks import check_texts, distinct_token_ids, read_number
from gateway.request.validate_stopping import Stopping

_SEEDS: Final = 2**64
_BIAS, _ALLOWED, _BAD_WORDS = (PARAMETERS[name] for name in ("logit_bias", "allowed_token_ids", "bad_words"))


@dataclass(frozen=True, slots=True)
class OutputCounts:
    """Valid numbers of outputs; see `ParsedRequest` for the fields."""

    n: int
    best_of: int | None
    beam_width: int | None


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Valid rules about single tokens; see `diptych.parameters.Sampling` for the fields."""

    logit_bias: dict[int, float] = field(repr=False)
    allowed_token_ids: tuple[int, ...] = field(repr=False)
    bad_words: tuple[tuple[int, ...], ...] = field(repr=False)


def read_sampling(
    params: pb.SamplingParams,
    rules: TokenRules,
    defaults: SamplingDefaults,
    vocab_size: int,
    fresh_seed: Callable[[], int],
) -> Sampling:
    """Resolve all values, `rules` among them. Raises InvalidParameter."""
    values: dict[str, Any] = {}
    for name, parameter in SAMPLING_NUMBERS.items():
        value = read_number(parameter, params)
        values[name] = getattr(defaults, name, OFF[name]) if value is None else value
    # Nothing is drawn in a beam search: the model's own temperature does not apply.
    if params.HasField("beam_width") and not params.HasField("temperature"):
        values["temperature"] = 0.0
    if values["temperature"] < GREEDY_BELOW:
        values["temperature"] = 0.0
    values["top_k"] = min(max(values["top_k"], 0), vocab_size)
    # Two's complement: int64 on the public side, uint64 between gateway and workers.
    values["seed"] = (params.seed if params.HasField("seed") else fresh_seed()) % _SEEDS
    return Sampling(
        **values,
        logit_bias=rules.logit_bias,
        allowed_token_ids=rules.allowed_token_ids,
        bad_words=rules.bad_words,
    )


def read_output_counts(params: pb.SamplingParams) -> OutputCounts:
    """Return how many outputs are made, and how. Raises InvalidParameter."""
    n = read_number(PARAMETERS["n"], params)
    n = 1 if n is None else n
    return OutputCounts(n, _best_of(params, n), _beam_width(params, n))


def _best_of(params: pb.SamplingParams, n: int) -> int | None:
    """Return `best_of`; None where it asks for no more than `n` does."""
    best_of: int | None = read_number(PARAMETERS["best_of"], params)
    if best_of is None:
        return None
    if best_of < n:
        raise InvalidParameter("sampling.best_of", "must be at least n")
    if best_of > n and params.HasField("beam_width"):
        raise InvalidParameter("sampling.best_of", "cannot be combined with beam_width")
    return best_of if best_of > n else None


def _beam_width(params: pb.SamplingParams, n: int) -> int | None:
    """Return the width; None for a single beam, which is greedy."""
    width: int | None = read_number(PARAMETERS["beam_width"], params)
    if width is None:
        return None
    if width < n:
        raise InvalidParameter("sampling.beam_width", "must be at least n")
    if params.temperature >= GREEDY_BELOW:
        raise InvalidParameter("sampling.temperature", "cannot be combined with beam_width")
    if params.HasField("seed"):
        raise InvalidParameter("sampling.seed", "cannot be combined with beam_width")
    return width if width > 1 else None


def read_token_rules(params: pb.SamplingParams, tokenizer: Tokenizer) -> TokenRules:
    """Return what makes single tokens likelier, or forbids them. Raises InvalidParameter."""
    vocab_size = tokenizer.vocab_size
    return TokenRules(
        logit_bias=_logit_bias(params, vocab_size),
        allowed_token_ids=distinct_token_ids(_ALLOWED, params.allowed_token_ids, vocab_size),
        bad_words=_bad_words(params, tokenizer),
    )


def check_a_token_is_left(rules: TokenRules, stops: Stopping, eos_token_ids: Collection[int]) -> None:
    """Raise InvalidParameter where a list of allowed tokens and the other rules leave no first token."""
    if not rules.allowed_token_ids:
        return
    left = set(rules.allowed_token_ids) - {word[0] for word in rules.bad_words if len(word) == 1}
    if stops.min_tokens:
        left.difference_update(stops.stop_token_ids, () if stops.ignore_eos else eos_token_ids)
    if not left:
        raise InvalidParameter("sampling.allowed_token_ids", "must hold a token that nothing else forbids")


def _logit_bias(params: pb.SamplingParams, vocab_size: int) -> dict[int, float]:
    if len(params.logit_bias) > _BIAS.most:
        raise InvalidParameter(_BIAS.wire, f"must have at most {_BIAS.most} entries")
    for token_id, bias in params.logit_bias.items():
        if token_id >= vocab_size:
            raise InvalidParameter(_BIAS.wire, f"must have ids below the vocabulary size {vocab_size}")
        if not _BIAS.allows(bias):
            raise InvalidParameter(_BIAS.wire, f"must have numbers from {_BIAS.low:g} to {_BIAS.high:g}")
    return dict(params.logit_bias)


def _bad_words(params: pb.SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, as it begins a text and as it follows a space."""
    check_texts(_BAD_WORDS, params.bad_words, "words")
    spellings: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(params.bad_words):
        for text in (word, f" {word}"):
            # As text in the middle of an answer: some tokenizers put a space before what begins a text.
            if ids := tuple(tokenizer.encode_parts(("", text))):
                spellings[ids] = None
            else:
                raise InvalidParameter(f"{_BAD_WORDS.wire}[{index}]", "must not be empty")
    return tuple(spellings)
