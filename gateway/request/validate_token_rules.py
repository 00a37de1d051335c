"""Checks of the knobs that make single tokens likelier, or forbid them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from diptych.runtime.errors import InvalidParameter
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.request.validate_stopping import Stopping
from gateway.request.validate_token_ids import distinct_token_ids


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Valid values; see `parsed_request.Sampling` for the fields."""

    logit_bias: dict[int, float] = field(repr=False)
    allowed_token_ids: tuple[int, ...] = field(repr=False)
    bad_words: tuple[tuple[int, ...], ...] = field(repr=False)


def token_rules(params: pb.SamplingParams, tokenizer: Tokenizer) -> TokenRules:
    """Raises `InvalidParameter`."""
    vocab_size = tokenizer.vocab_size
    return TokenRules(
        logit_bias=_logit_bias(params, vocab_size),
        allowed_token_ids=distinct_token_ids(
            "sampling.allowed_token_ids", params.allowed_token_ids, limits.MAX_ALLOWED_TOKEN_IDS, vocab_size
        ),
        bad_words=_bad_words(params, tokenizer),
    )


def check_something_may_come(rules: TokenRules, stops: Stopping, eos_token_ids: Collection[int]) -> None:
    """Raises `InvalidParameter` where a list of allowed tokens and the other knobs leave no first token."""
    if not rules.allowed_token_ids:
        return
    left = set(rules.allowed_token_ids) - {word[0] for word in rules.bad_words if len(word) == 1}
    if stops.min_tokens:
        left.difference_update(stops.stop_token_ids, () if stops.ignore_eos else eos_token_ids)
    if not left:
        raise InvalidParameter("sampling.allowed_token_ids", "must hold a token that nothing else forbids")


def _logit_bias(params: pb.SamplingParams, vocab_size: int) -> dict[int, float]:
    field_path, most = "sampling.logit_bias", limits.MAX_LOGIT_BIAS
    if len(params.logit_bias) > limits.MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidParameter(field_path, f"must have at most {limits.MAX_LOGIT_BIAS_ENTRIES} entries")
    for token_id, bias in params.logit_bias.items():
        if token_id >= vocab_size:
            raise InvalidParameter(field_path, f"must have ids below the vocabulary size {vocab_size}")
        # Written so that NaN, which compares false with everything, fails it.
        if not -most <= bias <= most:
            raise InvalidParameter(field_path, f"must have numbers from {-most:g} to {most:g}")
    return dict(params.logit_bias)


def _bad_words(params: pb.SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as it begins a text and as it follows a space."""
    if len(params.bad_words) > limits.MAX_BAD_WORDS:
        raise InvalidParameter("sampling.bad_words", f"must have at most {limits.MAX_BAD_WORDS} words")
    longest = limits.MAX_BAD_WORD_BYTES
    spellings: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(params.bad_words):
        if len(word) > longest or len(word.encode("utf-8")) > longest:
            raise InvalidParameter(f"sampling.bad_words[{index}]", f"must be at most {longest} bytes")
        for text in (word, f" {word}"):
            # As text in the middle of an answer: some tokenizers put a space before what begins a text.
            if ids := tuple(tokenizer.encode_parts(("", text))):
                spellings[ids] = None
            else:
                raise InvalidParameter(f"sampling.bad_words[{index}]", "must not be empty")
    return tuple(spellings)
