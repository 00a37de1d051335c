"""The words for what happens to an attempt at a request: plain values, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """The two kinds of worker that share one request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Cause(Enum):
    """Why an attempt ended without finishing the request."""

    INTERNAL = "internal"
    KV_TRANSFER_FAILED = "kv_transfer_failed"
    PEER_LOST = "peer_lost"  # one worker says that the other one is gone
    WORKER_LOST = "worker_lost"  # this gateway lost its link to a worker
    DRAINING = "draining"
    EXCEEDS_KV_CAPACITY = "exceeds_kv_capacity"
    DEADLINE = "deadline"
    INCOMPATIBLE = "incompatible"
    NO_VALID_TOKEN = "no_valid_token"  # the request's own rules leave no token
    COMPUTE_FAILED = (
        "compute_failed"  # the worker could not compute a token of it: an error, or logits not finite
    )
    PREEMPTED = "preempted"  # the decode worker ran out of blocks


class FinishReason(Enum):
    """How a request ends well (status OK)."""

    STOP = "stop"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"  # by CancelRequest: the caller's own cancel ends the RPC instead


@dataclass(frozen=True, slots=True)
class TokenScore:
    """What the model thought of a token; natural logarithms, see ``diptych.worker.v1.Score``."""

    logprob: float
    rank: int  # 1 = the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first
