"""Checks of ``sampling``: each knob in range, absent ones from the model's defaults.

How many outputs there are is `validate_outputs`'s, which tokens may come `validate_token_rules`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.model.served_model import SamplingDefaults
from gateway.request.parsed_request import Sampling
from gateway.request.validate_outputs import is_beam_search
from gateway.request.validate_token_rules import TokenRules

_SEEDS: Final = 2**64


def sampling(
    params: pb.SamplingParams,
    rules: TokenRules,
    defaults: SamplingDefaults,
    vocab_size: int,
    fresh_seed: Callable[[], int],
) -> Sampling:
    """Resolved values, `rules` among them. Raises `InvalidParameter`."""
    return Sampling(
        temperature=_temperature(params, defaults),
        top_p=_top_p(params, defaults),
        top_k=_top_k(params, defaults, vocab_size),
        min_p=_number(params, "min_p", 0.0, 1.0, defaults.min_p),
        frequency_penalty=_number(params, "frequency_penalty", -limits.MAX_PENALTY, limits.MAX_PENALTY, 0.0),
        presence_penalty=_number(params, "presence_penalty", -limits.MAX_PENALTY, limits.MAX_PENALTY, 0.0),
        repetition_penalty=_repetition_penalty(params, defaults),
        # Two's complement: int64 on the public side, uint64 between gateway and workers.
        seed=(params.seed if params.HasField("seed") else fresh_seed()) % _SEEDS,
        logit_bias=rules.logit_bias,
        allowed_token_ids=rules.allowed_token_ids,
        bad_words=rules.bad_words,
    )


def _temperature(params: pb.SamplingParams, defaults: SamplingDefaults) -> float:
    absent = 0.0 if is_beam_search(params) else defaults.temperature
    value = _number(params, "temperature", 0.0, limits.MAX_TEMPERATURE, absent)
    return 0.0 if value < limits.GREEDY_BELOW_TEMPERATURE else value


def _top_p(params: pb.SamplingParams, defaults: SamplingDefaults) -> float:
    value = _number(params, "top_p", 0.0, 1.0, defaults.top_p)
    if value == 0.0:
        raise InvalidParameter("sampling.top_p", "must be above 0 and at most 1")
    return value


def _top_k(params: pb.SamplingParams, defaults: SamplingDefaults, vocab_size: int) -> int:
    value = params.top_k if params.HasField("top_k") else defaults.top_k
    if value < -1:
        raise InvalidParameter("sampling.top_k", "must be at least -1 (-1 or 0 = off)")
    return min(max(value, 0), vocab_size)


def _repetition_penalty(params: pb.SamplingParams, defaults: SamplingDefaults) -> float:
    lowest, highest = limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY
    return _number(params, "repetition_penalty", lowest, highest, defaults.repetition_penalty)


def _number(params: pb.SamplingParams, name: str, lowest: float, highest: float, default: float) -> float:
    if not params.HasField(name):
        return default
    value: float = getattr(params, name)
    # Written so that NaN, which compares false with everything, fails it.
    if not lowest <= value <= highest:
        raise InvalidParameter(f"sampling.{name}", f"must be a number from {lowest:g} to {highest:g}")
    return value
