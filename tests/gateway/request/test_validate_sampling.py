"""``sampling``: numbers at their bounds, beyond them and absent; counts of outputs; rules about tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest

from diptych.parameters import GREEDY_BELOW, PARAMETERS, Sampling
from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.model.served_model import SamplingDefaults, ServedModel
from gateway.request.validate_sampling import (
    OutputCounts,
    TokenRules,
    check_a_token_is_left,
    read_output_counts,
    read_sampling,
    read_token_rules,
)
from gateway.request.validate_stopping import read_stopping

SERVED_VOCAB = 49_152
VOCAB = 1000
NO_RULES = TokenRules({}, (), ())
PENALTIES = ("frequency_penalty", "presence_penalty")
MOST = PARAMETERS["frequency_penalty"].high


def resolved(defaults: SamplingDefaults | None = None, **knobs: float) -> Sampling:
    params = pb.SamplingParams(**knobs)  # type: ignore[arg-type]
    return read_sampling(params, NO_RULES, defaults or SamplingDefaults(), VOCAB, fresh_seed=lambda: 11)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("temperature", "top_p", "min_p", *PENALTIES, "repetition_penalty")
          for value in (math.nan, math.inf, -math.inf)],
        ("temperature", -1e-7),
        ("temperature", PARAMETERS["temperature"].high * 1.0001),
        ("top_p", 0.0),
        ("top_p", -0.1),
        ("top_p", 1.0001),
        ("min_p", -0.0001),
        ("min_p", 1.0001),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", PARAMETERS["repetition_penalty"].low * 0.999),
        ("repetition_penalty", PARAMETERS["repetition_penalty"].high * 1.0001),
        *[(name, sign * MOST * 1.0001) for name in PENALTIES for sign in (-1, 1)],
        ("top_k", -2),
        ("top_k", -(2**31)),
    ],
)  # fmt: skip
def test_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidParameter) as caught:
        resolved(**{name: value})
    (violation,) = caught.value.violations
    assert violation.field == f"sampling.{name}"
    assert str(value) not in violation.description.split()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 0.0, 0.0),
        ("temperature", -0.0, 0.0),
        ("temperature", 1e-45, 0.0),  # denormal: greedy
        ("temperature", GREEDY_BELOW * 0.99, 0.0),
        ("temperature", PARAMETERS["temperature"].high, PARAMETERS["temperature"].high),
        ("top_p", 1.0, 1.0),
        ("min_p", 0.0, 0.0),
        ("min_p", 1.0, 1.0),
        ("repetition_penalty", PARAMETERS["repetition_penalty"].low, PARAMETERS["repetition_penalty"].low),
        ("repetition_penalty", PARAMETERS["repetition_penalty"].high, PARAMETERS["repetition_penalty"].high),
        *[(name, sign * MOST, sign * MOST) for name in PENALTIES for sign in (-1, 1)],
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", VOCAB, VOCAB),
        ("top_k", VOCAB + 1, VOCAB),
        ("top_k", 2**31 - 1, VOCAB),
        ("seed", 0, 0),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("seed", -(2**63), 2**63),
    ],
)
def test_in_range_is_taken(name: str, value: float, expected: float) -> None:
    assert getattr(resolved(**{name: value}), name) == expected


def test_smallest_temperature_that_samples() -> None:
    assert resolved(temperature=GREEDY_BELOW * 1.01).temperature > 0
    assert resolved(top_p=1e-45).top_p > 0  # denormal: the best token alone


def test_absent_is_the_models_default_and_zero_is_zero() -> None:
    defaults = SamplingDefaults(0.7, 0.8, 20, 0.05, 1.05)
    assert resolved(defaults) == Sampling(0.7, 0.8, 20, 0.05, 0.0, 0.0, 1.05, seed=11)
    assert resolved(defaults, beam_width=4) == Sampling(0.0, 0.8, 20, 0.05, 0.0, 0.0, 1.05, seed=11), "greedy"
    zeros = resolved(defaults, temperature=0.0, top_k=0, min_p=0.0, seed=0)
    assert (zeros.temperature, zeros.top_k, zeros.min_p, zeros.seed) == (0.0, 0, 0.0, 0)


def counted(**knobs: Any) -> OutputCounts:
    return read_output_counts(pb.SamplingParams(**knobs))


def test_absent_counts_are_one_output() -> None:
    one = OutputCounts(n=1, best_of=None, beam_width=None)
    assert counted() == one
    assert counted(n=1, best_of=1, beam_width=1) == one


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"n": PARAMETERS["n"].high}, (PARAMETERS["n"].high, None, None)),
        ({"best_of": PARAMETERS["n"].high}, (1, PARAMETERS["n"].high, None)),
        ({"n": 3, "best_of": 3}, (3, None, None)),
        ({"n": 3, "best_of": 4}, (3, 4, None)),
        ({"beam_width": PARAMETERS["beam_width"].high}, (1, None, PARAMETERS["beam_width"].high)),
        ({"beam_width": 2, "n": 2, "best_of": 2, "temperature": 0.0}, (2, None, 2)),
        ({"beam_width": 4, "temperature": GREEDY_BELOW / 2}, (1, None, 4)),
        ({"n": 4, "temperature": 0.0}, (4, None, None)),  # the same text four times is a legal wish
    ],
)
def test_counts_at_their_limits(knobs: dict[str, Any], expected: tuple[object, ...]) -> None:
    made = counted(**knobs)
    assert (made.n, made.best_of, made.beam_width) == expected


@pytest.mark.parametrize(
    ("field", "knobs"),
    [
        ("n", {"n": 0}),
        ("n", {"n": PARAMETERS["n"].high + 1}),
        ("n", {"n": 2**32 - 1}),
        ("best_of", {"best_of": 0}),
        ("best_of", {"best_of": PARAMETERS["n"].high + 1}),
        ("best_of", {"n": 4, "best_of": 3}),
        ("best_of", {"n": 2, "best_of": 3, "beam_width": 4}),
        ("beam_width", {"beam_width": 0}),
        ("beam_width", {"beam_width": PARAMETERS["beam_width"].high + 1}),
        ("beam_width", {"beam_width": 3, "n": 4}),
        ("beam_width", {"beam_width": 1, "n": 2}),
        ("temperature", {"beam_width": 2, "temperature": 0.5}),
        ("seed", {"beam_width": 2, "seed": 0}),
    ],
)
def test_counts_beyond_are_refused_by_name(field: str, knobs: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        counted(**knobs)
    assert [violation.field for violation in caught.value.violations] == [f"sampling.{field}"]


def checked(model: ServedModel, **knobs: Any) -> TokenRules:
    return read_token_rules(pb.SamplingParams(**knobs), model.tokenizer)


def refused(model: ServedModel, **knobs: Any) -> str:
    with pytest.raises(InvalidParameter) as caught:
        checked(model, **knobs)
    (violation,) = caught.value.violations
    return violation.field.removeprefix("sampling.")


def test_absent_rules_are_empty(bundled: ServedModel) -> None:
    assert checked(bundled) == TokenRules({}, (), ())


def test_logit_bias_at_its_limits(bundled: ServedModel) -> None:
    most = PARAMETERS["logit_bias"].high
    bias = {0: most, SERVED_VOCAB - 1: -most, 5: 0.0}
    assert checked(bundled, logit_bias=bias).logit_bias == bias
    full = dict.fromkeys(range(PARAMETERS["logit_bias"].most), 1.0)
    assert checked(bundled, logit_bias=full).logit_bias == full
    for bad in (
        full | {PARAMETERS["logit_bias"].most: 1.0},
        {SERVED_VOCAB: 1.0},
        {1: most * 1.0001},
        {1: -most * 1.0001},
        {1: math.nan},
        {1: math.inf},
    ):
        assert refused(bundled, logit_bias=bad) == "logit_bias"


def test_allowed_tokens_at_their_limits(bundled: ServedModel) -> None:
    last = SERVED_VOCAB - 1
    assert checked(bundled, allowed_token_ids=[last, 3, last]).allowed_token_ids == (last, 3)
    many = list(range(PARAMETERS["allowed_token_ids"].most))
    assert checked(bundled, allowed_token_ids=many).allowed_token_ids == tuple(many)
    assert refused(bundled, allowed_token_ids=[*many, 0]) == "allowed_token_ids"
    assert refused(bundled, allowed_token_ids=[3, SERVED_VOCAB]) == "allowed_token_ids[1]"


def test_bad_words_at_their_limits(bundled: ServedModel) -> None:
    words = [f"word{n}" for n in range(PARAMETERS["bad_words"].most)]
    assert len(checked(bundled, bad_words=words).bad_words) == 2 * len(words)
    assert refused(bundled, bad_words=[*words, "more"]) == "bad_words"
    longest = "é" * (PARAMETERS["bad_words"].longest // 2)
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
def test_rules_that_leave_no_token_are_refused(
    bundled: ServedModel, knobs: dict[str, Any], criteria: dict[str, Any], fine: bool
) -> None:
    rules, stops = checked(bundled, **knobs), read_stopping(pb.StoppingCriteria(**criteria), SERVED_VOCAB)
    if fine:
        check_a_token_is_left(rules, stops, (2,))
    else:
        with pytest.raises(InvalidParameter) as caught:
            check_a_token_is_left(rules, stops, (2,))
        assert [one.field for one in caught.value.violations] == ["sampling.allowed_token_ids"]


def test_repr_holds_no_rule(bundled: ServedModel) -> None:
    assert "81" not in repr(checked(bundled, bad_words=["a"], allowed_token_ids=[81], logit_bias={81: 1.0}))
