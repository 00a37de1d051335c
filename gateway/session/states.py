"""States of a choice, and the transitions between them that are allowed.

What each state means is told at the top of `gateway.session.choice_state`, which moves between them.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The states of a choice. The values are the phase names that clients see in errors."""

    QUEUED = "admission"
    ROUTING = "routing"
    PREFILLING = "prefill"
    DECODING = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    ABANDONED = "abandoned"


TERMINAL = frozenset({State.FINISHED, State.FAILED, State.ABANDONED})
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: TERMINAL | {State.ROUTING},
    State.ROUTING: TERMINAL | {State.PREFILLING},
    State.PREFILLING: TERMINAL | {State.DECODING, State.ROUTING},
    State.DECODING: TERMINAL | {State.ROUTING},
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: frozenset(),
}


class InvalidTransition(Exception):
    """A transition that `TRANSITIONS` forbids: a bug in the caller or in the table."""


def check_transition(from_state: State, to: State) -> None:
    """Raise InvalidTransition for one that is not in the table."""
    if to not in TRANSITIONS[from_state]:
        raise InvalidTransition(f"{from_state.name} → {to.name}")
