"""The choice between a pair of workers and a decode worker that computes the prompt itself. Pure.

This is conditional disaggregation: few new tokens are not worth the way to a prefill worker, where they wait
behind longer prompts. Both ways are compared by the seconds until the first token:

- **remote**: the pair's cost (`gateway.worker_pool.router`), which counts tokens, at the measured rate of
  prefill, and the round trip of grant and commit;
- **local**: as many steps as the new tokens need, and those that wait there before them, in chunks beside the
  sequences that run; half a step until the first of them begins; and what longer steps cost these sequences.

A prompt that is wholly cached on the decode worker of the pair needs no comparison: it makes no round trip.

A decode worker says how many new tokens it computes itself. It counts them again, since the index of prefixes
may be wrong, and answers TOO_MANY_NEW; the next attempt is then remote.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from gateway.attempt.types import LocalPrefill
from gateway.worker_pool.candidates import DecodeCandidate
from gateway.worker_pool.cheapest_pair import MISSING_TOKEN_COST, SEQUENCE_COST
from gateway.worker_pool.pair_savings import loaded_blocks
from gateway.worker_pool.router import NoWorker, Route, RouteRequest, usable_blocks
from gateway.worker_pool.step_rates import StepRates

HANDOFF_S = 0.003  # ask, grant and commit between two workers of one host
STREAM_WEIGHT = 0.1  # a second of a running stream, in seconds of the request that delays it
LOCAL, FALLBACK = "local", "fallback"
"""Reasons of a route, beside the router's own."""


class LocalMode(Enum):
    """Rule by which decode workers compute prompts themselves."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class LocalCandidate:
    """A decode worker, and what prompts it computes itself."""

    decode: DecodeCandidate
    short: int  # most new tokens of a prompt
    fallback: int  # likewise while no prefill worker is ready
    chunk: int  # tokens of a step beside running sequences
    waiting_tokens: int  # of such prompts that are there
    rates: StepRates


def choose_local(
    request: RouteRequest,
    remote: Route | NoWorker,
    candidates: Iterable[LocalCandidate],
    mode: LocalMode,
    *,
    token_s: float,
    fall_back: bool,
) -> Route | None:
    """Return the route of a decode worker alone if that is the better one, else None.

    ``token_s``: seconds a token of prefill. ``fall_back``: no prefill worker is ready.
    """
    if mode is LocalMode.NEVER or request.remote:
        return None
    kind = LocalPrefill.FALLBACK if fall_back else LocalPrefill.SHORT
    usable = [one for one in candidates if _may_compute(request, one, kind)]
    if not usable:
        return None
    best = min(usable, key=lambda one: (local_cost_s(request, one, token_s), one.decode.worker_id))
    if isinstance(remote, Route) and mode is LocalMode.AUTO:
        there = next((one for one in usable if one.decode.worker_id == remote.decode_id), None)
        if there is not None and _fully_cached(request, there.decode):
            best = there
        elif local_cost_s(request, best, token_s) > _remote_cost_s(request, remote, best, token_s):
            return None
    cost_s = local_cost_s(request, best, token_s)
    return Route(
        None,
        best.decode.worker_id,
        FALLBACK if fall_back else LOCAL,
        matched_blocks=usable_blocks(request, best.decode),
        cost=cost_s / token_s,
        local=kind,
    )


def _remote_cost_s(request: RouteRequest, remote: Route, other: LocalCandidate, token_s: float) -> float:
    """Return what a pair costs in seconds; its last step reads all weights, however few its tokens are."""
    new = new_tokens(request, other.decode)
    fixed_s = max(other.rates.step_s(new, token_s) - new * token_s, 0.0)
    return remote.cost * token_s + fixed_s + HANDOFF_S


def _fully_cached(request: RouteRequest, decode: DecodeCandidate) -> bool:
    """Return whether no whole block of the request is missing, and there is one."""
    return usable_blocks(request, decode) == (request.tokens - 1) // decode.block_size > 0


def new_tokens(request: RouteRequest, decode: DecodeCandidate) -> int:
    """Return the tokens of the request that a decode worker does not hold, at least one."""
    return request.tokens - usable_blocks(request, decode) * decode.block_size


def local_cost_s(request: RouteRequest, candidate: LocalCandidate, token_s: float) -> float:
    """Return what it costs to compute the prompt on its decode worker, in seconds."""
    decode, rates = candidate.decode, candidate.rates
    new = new_tokens(request, decode)
    loaded = loaded_blocks(usable_blocks(request, decode), decode)
    missing = max(0, -(-new // decode.block_size) + loaded - decode.free_blocks) * decode.block_size
    waiting, running = candidate.waiting_tokens + new, decode.sequences
    load_tokens = loaded * decode.block_size * decode.load_cost
    place_s = (SEQUENCE_COST * running + MISSING_TOKEN_COST * missing + load_tokens) * token_s
    if not running:
        return place_s + rates.step_s(waiting, token_s)
    chunk = max(min(candidate.chunk, waiting), 1)
    plain_s, mixed_s = rates.step_s(running, token_s), rates.step_s(running + chunk, token_s)
    steps = -(-waiting // chunk)
    delay_s = steps * (mixed_s - plain_s) * running
    return place_s + plain_s / 2 + steps * mixed_s + STREAM_WEIGHT * delay_s


def _may_compute(request: RouteRequest, candidate: LocalCandidate, kind: LocalPrefill) -> bool:
    decode = candidate.decode
    bound = candidate.fallback if kind is LocalPrefill.FALLBACK else candidate.short
    return (
        decode.worker_id not in request.avoid
        and decode.max_tokens >= request.worst_case_tokens
        and new_tokens(request, decode) <= bound
        and request.tokens - new_tokens(request, decode) >= request.images_end
    )
