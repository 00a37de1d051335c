"""Sampling knobs at their bounds, just beyond them, and absent."""

from __future__ import annotations

import math

import pytest

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.model.served_model import SamplingDefaults
from gateway.request.parsed_request import Sampling
from gateway.request.validate_sampling import sampling
from gateway.request.validate_token_rules import TokenRules

VOCAB = 1000
NO_RULES = TokenRules({}, (), ())
PENALTIES = ("frequency_penalty", "presence_penalty")


def resolved(defaults: SamplingDefaults | None = None, **knobs: float) -> Sampling:
    params = pb.SamplingParams(**knobs)  # type: ignore[arg-type]
    return sampling(params, NO_RULES, defaults or SamplingDefaults(), VOCAB, fresh_seed=lambda: 11)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("temperature", "top_p", "min_p", *PENALTIES, "repetition_penalty")
          for value in (math.nan, math.inf, -math.inf)],
        ("temperature", -1e-7),
        ("temperature", limits.MAX_TEMPERATURE * 1.0001),
        ("top_p", 0.0),
        ("top_p", -0.1),
        ("top_p", 1.0001),
        ("min_p", -0.0001),
        ("min_p", 1.0001),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", limits.MIN_REPETITION_PENALTY * 0.999),
        ("repetition_penalty", limits.MAX_REPETITION_PENALTY * 1.0001),
        *[(name, sign * limits.MAX_PENALTY * 1.0001) for name in PENALTIES for sign in (-1, 1)],
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
        ("temperature", limits.GREEDY_BELOW_TEMPERATURE * 0.99, 0.0),
        ("temperature", limits.MAX_TEMPERATURE, limits.MAX_TEMPERATURE),
        ("top_p", 1.0, 1.0),
        ("min_p", 0.0, 0.0),
        ("min_p", 1.0, 1.0),
        ("repetition_penalty", limits.MIN_REPETITION_PENALTY, limits.MIN_REPETITION_PENALTY),
        ("repetition_penalty", limits.MAX_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY),
        *[
            (name, sign * limits.MAX_PENALTY, sign * limits.MAX_PENALTY)
            for name in PENALTIES
            for sign in (-1, 1)
        ],
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


def test_the_smallest_temperature_that_samples() -> None:
    assert resolved(temperature=limits.GREEDY_BELOW_TEMPERATURE * 1.01).temperature > 0
    assert resolved(top_p=1e-45).top_p > 0  # denormal: the best token alone


def test_absent_is_the_models_default_and_zero_is_zero() -> None:
    defaults = SamplingDefaults(0.7, 0.8, 20, 0.05, 1.05)
    assert resolved(defaults) == Sampling(0.7, 0.8, 20, 0.05, 0.0, 0.0, 1.05, seed=11)
    assert resolved(defaults, beam_width=4) == Sampling(0.0, 0.8, 20, 0.05, 0.0, 0.0, 1.05, seed=11), "greedy"
    zeros = resolved(defaults, temperature=0.0, top_k=0, min_p=0.0, seed=0)
    assert (zeros.temperature, zeros.top_k, zeros.min_p, zeros.seed) == (0.0, 0, 0.0, 0)
