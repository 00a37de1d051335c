"""The states of one choice of a request, and which may follow which."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a request is. The values are the phase names that clients see in errors."""

    QUEUED = "admission"
    ROUTING = "routing"
    PREFILLING = "prefill"
    DECODING = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    ABANDONED = "abandoned"


ENDS = frozenset({State.FINISHED, State.FAILED, State.ABANDONED})
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: ENDS | {State.ROUTING},
    State.ROUTING: ENDS | {State.PREFILLING},
    State.PREFILLING: ENDS | {State.DECODING, State.ROUTING},
    State.DECODING: ENDS | {State.ROUTING},
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: frozenset(),
}


class InvalidTransition(Exception):
    """The session was asked to do what its table forbids: a bug in the caller or in the table."""
