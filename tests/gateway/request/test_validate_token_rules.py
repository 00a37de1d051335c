"""Biases, allowed tokens and bad words: at each limit, one above, and by which tokens a word is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.model.served_model import ServedModel
from gateway.request.validate_stopping import stopping
from gateway.request.validate_token_rules import TokenRules, check_something_may_come, token_rules

VOCAB = 49_152


def checked(model: ServedModel, **knobs: Any) -> TokenRules:
    return token_rules(pb.SamplingParams(**knobs), model.tokenizer)


def refused(model: ServedModel, **knobs: Any) -> str:
    with pytest.raises(InvalidParameter) as caught:
        checked(model, **knobs)
    (violation,) = caught.value.violations
    return violation.field.removeprefix("sampling.")


def test_absent_is_nothing(bundled: ServedModel) -> None:
    assert checked(bundled) == TokenRules({}, (), ())


def test_logit_bias_at_its_limits(bundled: ServedModel) -> None:
    most = limits.MAX_LOGIT_BIAS
    bias = {0: most, VOCAB - 1: -most, 5: 0.0}
    assert checked(bundled, logit_bias=bias).logit_bias == bias
    full = dict.fromkeys(range(limits.MAX_LOGIT_BIAS_ENTRIES), 1.0)
    assert checked(bundled, logit_bias=full).logit_bias == full
    for bad in (
        full | {limits.MAX_LOGIT_BIAS_ENTRIES: 1.0},
        {VOCAB: 1.0},
        {1: most * 1.0001},
        {1: -most * 1.0001},
        {1: math.nan},
        {1: math.inf},
    ):
        assert refused(bundled, logit_bias=bad) == "logit_bias"


def test_allowed_tokens_at_their_limits(bundled: ServedModel) -> None:
    assert checked(bundled, allowed_token_ids=[VOCAB - 1, 3, VOCAB - 1]).allowed_token_ids == (VOCAB - 1, 3)
    many = list(range(limits.MAX_ALLOWED_TOKEN_IDS))
    assert checked(bundled, allowed_token_ids=many).allowed_token_ids == tuple(many)
    assert refused(bundled, allowed_token_ids=[*many, 0]) == "allowed_token_ids"
    assert refused(bundled, allowed_token_ids=[3, VOCAB]) == "allowed_token_ids[1]"


def test_bad_words_at_their_limits(bundled: ServedModel) -> None:
    words = [f"word{n}" for n in range(limits.MAX_BAD_WORDS)]
    assert len(checked(bundled, bad_words=words).bad_words) == 2 * len(words)
    assert refused(bundled, bad_words=[*words, "more"]) == "bad_words"
    longest = "é" * (limits.MAX_BAD_WORD_BYTES // 2)
    assert checked(bundled, bad_words=[longest]).bad_words
    assert refused(bundled, bad_words=["x", f"{longest}x"]) == "bad_words[1]"
    assert refused(bundled, bad_words=["x", "x" * 1_000_000]) == "bad_words[1]"
    assert refused(bundled, bad_words=[""]) == "bad_words[0]"


def test_a_word_is_known_by_its_tokens_with_and_without_a_space_before_it(bundled: ServedModel) -> None:
    found = checked(bundled, bad_words=["Paris", "Paris", "New York"]).bad_words
    assert [bundled.tokenizer.decode(ids, skip_special=False) for ids in found] == [
        "Paris", " Paris", "New York", " New York",
    ]  # fmt: skip
    assert checked(bundled, bad_words=["<|im_end|>"]).bad_words != ((2,),), "text, never a control token"


@pytest.mark.parametrize(
    ("knobs", "criteria", "fine"),
    [
        ({"allowed_token_ids": [2]}, {}, True),
        ({"allowed_token_ids": [2]}, {"min_tokens": 1}, False),
        ({"allowed_token_ids": [2]}, {"min_tokens": 1, "ignore_eos": True}, True),
        ({"allowed_token_ids": [2, 9]}, {"min_tokens": 1, "stop_token_ids": [9]}, False),
        ({"allowed_token_ids": [2, 9, 8]}, {"min_tokens": 1, "stop_token_ids": [9]}, True),
        ({"allowed_token_ids": [81, 253], "bad_words": ["a"]}, {}, False),
        ({"allowed_token_ids": [81, 253, 5], "bad_words": ["a"]}, {}, True),
        ({"bad_words": ["a"]}, {"min_tokens": 1}, True),
    ],
)
def test_something_must_be_allowed(
    bundled: ServedModel, knobs: dict[str, Any], criteria: dict[str, Any], fine: bool
) -> None:
    rules, stops = checked(bundled, **knobs), stopping(pb.StoppingCriteria(**criteria), VOCAB)
    if fine:
        check_something_may_come(rules, stops, (2,))
    else:
        with pytest.raises(InvalidParameter) as caught:
            check_something_may_come(rules, stops, (2,))
        assert [one.field for one in caught.value.violations] == ["sampling.allowed_token_ids"]


def test_what_the_caller_wrote_is_not_in_repr(bundled: ServedModel) -> None:
    assert "81" not in repr(checked(bundled, bad_words=["a"], allowed_token_ids=[81], logit_bias={81: 1.0}))
