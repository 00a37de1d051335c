"""The types of an attempt at a request, and the events that its workers report: no protobuf, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple


class Role(Enum):
    """The kinds of worker that share one request; the last one only where it has images."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


TEXT_ROLES: Final = (Role.PREFILL, Role.DECODE)
"""Roles that every request needs, and between which a worker may change."""


class Cause(Enum):
    """The reason for which an attempt ended without finishing the request."""

    INTERNAL = "internal"
    KV_TRANSFER_FAILED = "kv_transfer_failed"
    PEER_LOST = "peer_lost"  # reported by the other worker of the pair
    WORKER_LOST = "worker_lost"  # this gateway lost its link to the worker
    DRAINING = "draining"
    EXCEEDS_KV_CAPACITY = "exceeds_kv_capacity"
    DEADLINE = "deadline"
    INCOMPATIBLE = "incompatible"
    NO_VALID_TOKEN = "no_valid_token"  # the request's own rules leave no token
    COMPUTE_FAILED = "compute_failed"  # the worker could not compute a token: an error, or logits not finite
    PREEMPTED = "preempted"  # the decode worker ran out of blocks
    ADAPTER_NOT_LOADED = "adapter_not_loaded"  # the worker does not have it, or not any more
    ENCODER_LOST = "encoder_lost"  # reported by the prefill worker, which does not get its images' rows
    TOO_MANY_NEW = "too_many_new"  # for a decode worker to compute them itself: an answer, no failure


class LocalPrefill(Enum):
    """Worker that computes an attempt's prompt: a prefill worker, or its decode worker itself."""

    NO = "no"
    SHORT = "short"  # few of its tokens are new
    FALLBACK = "fallback"  # no prefill worker is ready


class EncoderRoute(NamedTuple):
    """The encode worker of an attempt with images.

    ``cached_tokens``: expected to be cached, so that images before them may need no encoding.
    """

    worker_id: str
    cached_tokens: int


class FinishReason(Enum):
    """The ways in which a request ends with status OK."""

    STOP = "stop"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"  # by CancelRequest: the caller's own cancel ends the RPC instead


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token and its rank; natural logarithms, see ``diptych.worker.v1.Score``."""

    logprob: float
    rank: int  # 1 = the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


class TokensArrived(NamedTuple):
    """Tokens of a choice's output from ``position`` on. Positions count over all attempts.

    ``logprobs``: one for each token, or none at all. ``early``: from the prefill worker, before the decode
    worker has taken over. (A NamedTuple: it is made for every token, four times as fast as a frozen
    dataclass.)
    """

    attempt: int
    position: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    early: bool = False

    def __repr__(self) -> str:
        return f"TokensArrived({self.attempt}, {self.position}, {len(self.token_ids)} ids, {self.choice})"


@dataclass(frozen=True, slots=True)
class PrefillCommitted:
    """The prefill worker's terminal message: the decode worker has all KV blocks."""

    attempt: int


@dataclass(frozen=True, slots=True)
class ImagesDelivered:
    """The encode worker's terminal message: the prefill worker has the rows of all images that it needs."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The decode worker's terminal message on a choice that is complete."""

    attempt: int
    reason: FinishReason
    choice: int = 0


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The terminal message of the worker in ``role``: it cannot complete this attempt, or preempted it.

    A decode worker sends one for each choice; a prefill worker (``choice`` None) one for the whole attempt.
    """

    attempt: int
    role: Role
    cause: Cause
    choice: int | None = None


AttemptEvent = TokensArrived | ImagesDelivered | PrefillCommitted | DecodeFinished | AttemptFailed
