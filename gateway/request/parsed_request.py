"""Generation request after validation: plain values, every default resolved, nothing left to check.

Made by ``gateway.request.validation.parse_request``; protobuf ends there. What a caller wrote (ids, stop
strings, salt, the names it chose) stays out of ``repr``, so that a log line cannot carry it by accident.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych.parameters import Sampling
from gateway.adapters.adapter import Adapter
from gateway.reasoning.request_reasoning import RequestReasoning
from gateway.request.structured_output import Constraint
from gateway.tools.tool import Toolbox


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A valid ``GenerateRequest``. ``prompt_ids`` is never empty and every id is in the vocabulary."""

    request_id: str  # the caller's or a fresh one; never empty
    model: str  # the card's name, never an alias; with an adapter its name
    prompt_ids: tuple[int, ...] = field(repr=False)
    sampling: Sampling
    max_tokens: int | None  # None = up to the context limit, see `output_budget`
    min_tokens: int  # 0 = none
    stop: tuple[str, ...] = field(repr=False)
    stop_token_ids: tuple[int, ...] = field(repr=False)  # the client's own, without end-of-sequence ids
    ignore_eos: bool
    include_stop: bool
    time_limit_s: float | None
    want_text: bool
    want_token_ids: bool
    skip_special: bool
    stream_interval: int  # tokens per message, at least 1
    want_timings: bool
    salt: str = field(repr=False)
    cache_read: bool
    cache_write: bool
    priority: int  # higher runs earlier
    session_id: str = field(repr=False)
    n: int = 1  # outputs that the client gets
    best_of: int | None = None  # at least n: so many are made, the n likeliest are kept
    beam_width: int | None = None  # at least n; None = no beam search
    logprobs: int | None = None  # alternatives beside each output token; None = no scores
    prompt_logprobs: int | None = None  # likewise for the prompt's tokens
    echo: bool = False  # the prompt's ids come back with the first message
    constraint: Constraint | None = None  # what the output must match
    tools: Toolbox | None = None  # that the output may call
    reasoning: RequestReasoning | None = None  # that the output may begin with
    received: tuple[int, ...] = field(default=(), repr=False)  # of the output, by a stream that broke
    output_limit: int | None = None  # what that stream might have emitted in all
    adapter: Adapter | None = None  # applied to the model; None = none

    @property
    def choices(self) -> int:
        """Outputs that are made: sequences of the workers, or beams that are delivered."""
        return self.best_of or self.n

    @property
    def worker_logprobs(self) -> int | None:
        """Alternatives that the workers send with each token; None = tokens without scores."""
        # The best are chosen by the scores of their tokens.
        return 0 if self.logprobs is None and self.best_of is not None else self.logprobs

    def output_budget(self, max_context: int) -> int:
        """Most tokens this request may emit: its own limit, or what the context leaves after the prompt."""
        left = max_context - len(self.prompt_ids)
        if self.output_limit is not None:
            left = min(left, self.output_limit)
        return left if self.max_tokens is None else min(left, self.max_tokens)

    def worker_stop_ids(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Ids at which a worker stops: the client's, and the model's end-of-sequence ids unless ignored.

        A constrained output ends where its grammar ends: that cannot be ignored.
        """
        eos = () if self.ignore_eos and self.constraint is None else tuple(eos_token_ids)
        return tuple(dict.fromkeys((*eos, *self.stop_token_ids)))
