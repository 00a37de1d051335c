"""Checks of ``stopping``, and of prompt and output together against the model's context."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.duration_pb2 import Duration

from diptych.parameters import PARAMETERS
from diptych.runtime.errors import ContextLengthExceeded, InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.request.field_checks import check_range, check_texts, distinct_token_ids, read_number

_NANOS_PER_SECOND: Final = 1_000_000_000
_STOP, _STOP_IDS, _TIME_LIMIT = (PARAMETERS[name] for name in ("stop", "stop_token_ids", "time_limit_s"))


@dataclass(frozen=True, slots=True)
class Stopping:
    """Valid ``stopping``; see `ParsedRequest` for the fields."""

    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...] = field(repr=False)
    stop_token_ids: tuple[int, ...] = field(repr=False)
    ignore_eos: bool
    include_stop: bool
    time_limit_s: float | None


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Tokens that a prompt may have: ``limit`` less what the request wants to generate."""

    limit: int  # the model's context, or the whole KV pool if that is smaller
    wanted: int  # output tokens the request insists on, at least 1
    wanted_by: str = "stopping.max_tokens"  # the field that insists

    def check(self, field: str, prompt_tokens: int) -> None:
        """Raise ContextLengthExceeded for a prompt that does not fit, or not beside the wanted output.

        The error names ``field``, or `wanted_by` where the prompt would fit with less output.
        """
        if prompt_tokens + self.wanted > self.limit:
            field = self.wanted_by if prompt_tokens < self.limit else field
            raise ContextLengthExceeded(prompt_tokens, self.wanted, self.limit, field=field)

    def check_before_counting(self, field: str, fewest: int) -> None:
        """Raise ContextLengthExceeded for a prompt of at least ``fewest`` tokens that fits with no output.

        Where less output would do, the caller is owed the prompt's real size, to ask for what is left.
        """
        if fewest >= self.limit:
            raise ContextLengthExceeded(fewest, self.wanted, self.limit, at_least=True, field=field)


def read_stopping(criteria: pb.StoppingCriteria, vocab_size: int) -> Stopping:
    """Return the valid values. Raises InvalidParameter."""
    max_tokens: int | None = read_number(PARAMETERS["max_tokens"], criteria)
    if max_tokens is not None and criteria.min_tokens > max_tokens:
        raise InvalidParameter("stopping.min_tokens", "must be at most max_tokens")
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=criteria.min_tokens,
        stop=_stop_strings(criteria),
        stop_token_ids=distinct_token_ids(_STOP_IDS, criteria.stop_token_ids, vocab_size),
        ignore_eos=criteria.ignore_eos,
        include_stop=criteria.include_stop_in_output,
        time_limit_s=_seconds(criteria.time_limit) if criteria.HasField("time_limit") else None,
    )


def prompt_budget(stops: Stopping, limit: int) -> TokenBudget:
    """Return the prompt's budget under ``limit`` tokens in all."""
    if stops.max_tokens is None:
        return TokenBudget(limit, max(1, stops.min_tokens), "stopping.min_tokens")
    return TokenBudget(limit, max(1, stops.max_tokens))


def _stop_strings(criteria: pb.StoppingCriteria) -> tuple[str, ...]:
    check_texts(_STOP, criteria.stop, "strings")
    for index, text in enumerate(criteria.stop):
        if not text:
            raise InvalidParameter(f"{_STOP.wire}[{index}]", "must not be empty")
    return tuple(dict.fromkeys(criteria.stop))


def _seconds(time_limit: Duration) -> float:
    seconds = time_limit.seconds + time_limit.nanos / _NANOS_PER_SECOND
    check_range(_TIME_LIMIT, seconds if 0 <= time_limit.nanos < _NANOS_PER_SECOND else math.nan)
    return seconds
