"""Checks of ``stopping``, and of prompt and output together against the model's context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from google.protobuf.duration_pb2 import Duration

from diptych.runtime.errors import ContextLengthExceeded, InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.request.validate_token_ids import distinct_token_ids

_NANOS_PER_SECOND: Final = 1_000_000_000


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
    """How many tokens a prompt may have: ``limit`` less what the request wants to generate."""

    limit: int  # the model's context, or the whole KV pool if that is smaller
    wanted: int  # output tokens the request insists on, at least 1

    def check(self, field: str, prompt_tokens: int) -> None:
        """Raises `ContextLengthExceeded`."""
        if prompt_tokens + self.wanted > self.limit:
            raise ContextLengthExceeded(prompt_tokens, self.wanted, self.limit, field=field)

    def check_before_counting(self, field: str, fewest: int) -> None:
        """Raises `ContextLengthExceeded` for a prompt of at least ``fewest`` tokens that fits with no output.

        Where less output would do, the caller is owed the prompt's real size, to ask for what is left.
        """
        if fewest >= self.limit:
            raise ContextLengthExceeded(fewest, self.wanted, self.limit, at_least=True, field=field)


def stopping(criteria: pb.StoppingCriteria, vocab_size: int) -> Stopping:
    """Raises `InvalidParameter`."""
    max_tokens = criteria.max_tokens if criteria.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidParameter("stopping.max_tokens", "must be at least 1")
    if max_tokens is not None and criteria.min_tokens > max_tokens:
        raise InvalidParameter("stopping.min_tokens", "must be at most max_tokens")
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=criteria.min_tokens,
        stop=_stop_strings(criteria),
        stop_token_ids=distinct_token_ids(
            "stopping.stop_token_ids", criteria.stop_token_ids, limits.MAX_STOP_TOKEN_IDS, vocab_size
        ),
        ignore_eos=criteria.ignore_eos,
        include_stop=criteria.include_stop_in_output,
        time_limit_s=_time_limit(criteria.time_limit) if criteria.HasField("time_limit") else None,
    )


def budget(stops: Stopping, limit: int) -> TokenBudget:
    """The prompt's budget under ``limit`` tokens in all."""
    wanted = stops.min_tokens if stops.max_tokens is None else stops.max_tokens
    return TokenBudget(limit, max(1, wanted))


def _stop_strings(criteria: pb.StoppingCriteria) -> tuple[str, ...]:
    if len(criteria.stop) > limits.MAX_STOP_STRINGS:
        raise InvalidParameter("stopping.stop", f"must have at most {limits.MAX_STOP_STRINGS} strings")
    longest = limits.MAX_STOP_STRING_BYTES
    for index, text in enumerate(criteria.stop):
        if not text:
            raise InvalidParameter(f"stopping.stop[{index}]", "must not be empty")
        if len(text) > longest or len(text.encode("utf-8")) > longest:
            raise InvalidParameter(f"stopping.stop[{index}]", f"must be at most {longest} bytes")
    return tuple(dict.fromkeys(criteria.stop))


def _time_limit(duration: Duration) -> float:
    seconds = duration.seconds + duration.nanos / _NANOS_PER_SECOND
    if not 0 <= duration.nanos < _NANOS_PER_SECOND or not 0 < seconds <= limits.MAX_TIME_LIMIT_SECONDS:
        raise InvalidParameter(
            "stopping.time_limit", f"must be above 0 and at most {limits.MAX_TIME_LIMIT_SECONDS:g} seconds"
        )
    return seconds
