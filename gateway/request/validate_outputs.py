"""Checks of how many outputs are asked for, how they are chosen, and what is told about their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits


@dataclass(frozen=True, slots=True)
class Outputs:
    """Valid counts; see `ParsedRequest` for the fields."""

    n: int
    best_of: int | None
    beam_width: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool


def outputs(params: pb.SamplingParams, response: pb.ResponseOptions) -> Outputs:
    """Raises `InvalidParameter`."""
    n = _count("n", params.n, limits.MAX_N) if params.HasField("n") else 1
    return Outputs(
        n=n,
        best_of=_best_of(params, n),
        beam_width=_beam_width(params, n),
        logprobs=_alternatives(response, "logprobs"),
        prompt_logprobs=_alternatives(response, "prompt_logprobs"),
        echo=response.echo_prompt,
    )


def is_beam_search(params: pb.SamplingParams) -> bool:
    """Whether nothing is drawn; the model's default temperature does not apply then."""
    return params.HasField("beam_width")


def _best_of(params: pb.SamplingParams, n: int) -> int | None:
    """None where it asks for no more than `n` does."""
    if not params.HasField("best_of"):
        return None
    best_of = _count("best_of", params.best_of, limits.MAX_N)
    if best_of < n:
        raise InvalidParameter("sampling.best_of", "must be at least n")
    if best_of > n and params.HasField("beam_width"):
        raise InvalidParameter("sampling.best_of", "cannot be combined with beam_width")
    return best_of if best_of > n else None


def _beam_width(params: pb.SamplingParams, n: int) -> int | None:
    """None for a single beam: that is greedy."""
    if not params.HasField("beam_width"):
        return None
    width = _count("beam_width", params.beam_width, limits.MAX_BEAM_WIDTH)
    if width < n:
        raise InvalidParameter("sampling.beam_width", "must be at least n")
    if params.temperature >= limits.GREEDY_BELOW_TEMPERATURE:
        raise InvalidParameter("sampling.temperature", "cannot be combined with beam_width")
    if params.HasField("seed"):
        raise InvalidParameter("sampling.seed", "cannot be combined with beam_width")
    return width if width > 1 else None


def _count(name: str, value: int, highest: int) -> int:
    if not 1 <= value <= highest:
        raise InvalidParameter(f"sampling.{name}", f"must be from 1 to {highest}")
    return value


def _alternatives(response: pb.ResponseOptions, name: str) -> int | None:
    if not response.HasField(name):
        return None
    count: int = getattr(response, name)
    if count > limits.MAX_LOGPROBS:
        raise InvalidParameter(f"response.{name}", f"must be at most {limits.MAX_LOGPROBS}")
    return count
