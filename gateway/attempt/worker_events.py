"""What workers say of an attempt that concerns its request: plain frozen values, no protobuf, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.attempt.types import Cause, FinishReason, Role, TokenScore


class TokensArrived(NamedTuple):
    """Tokens of a choice's output from ``position`` on. Positions count over all attempts.

    ``scores``: one for each token, or none at all. ``early``: the prefill worker says so, before the decode
    worker has taken over. (A NamedTuple: it is made for every token, four times as fast as a frozen
    dataclass.)
    """

    attempt: int
    position: int
    token_ids: tuple[int, ...]
    choice: int = 0
    scores: tuple[TokenScore, ...] = ()
    early: bool = False

    def __repr__(self) -> str:
        return f"TokensArrived({self.attempt}, {self.position}, {len(self.token_ids)} ids, {self.choice})"


@dataclass(frozen=True, slots=True)
class PrefillCommitted:
    """The prefill worker's last word: the decode worker has everything."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The decode worker's last word on a choice that is complete."""

    attempt: int
    reason: FinishReason
    choice: int = 0


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The last word of the worker in ``role``: it cannot complete this attempt. Preemption comes here too.

    A decode worker says it of each choice; a prefill worker (``choice`` None) of the whole attempt.
    """

    attempt: int
    role: Role
    cause: Cause
    choice: int | None = None


WorkerEvent = TokensArrived | PrefillCommitted | DecodeFinished | AttemptFailed
