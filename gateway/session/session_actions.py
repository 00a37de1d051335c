"""What comes out of a session, for its conversation to carry out: plain frozen values, as its events are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.runtime.errors import DiptychError
from gateway.attempt.types import FinishReason, Role, TokenScore
from gateway.attempt.work import Attempt


@dataclass(frozen=True, slots=True)
class NeedRoute:
    """A choice needs an attempt."""

    choice: int


@dataclass(frozen=True, slots=True)
class AwaitWorker:
    """Nobody can take the choice now. Say `WaitOver` after ``seconds``, and `WorkerUp` when one comes."""

    choice: int
    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChooseRoute:
    """Pick a prefill and a decode worker for these tokens; answer with `Routed` or `NoRoute`."""

    token_ids: tuple[int, ...] = field(repr=False)  # prompt, then what was delivered
    avoid: frozenset[str]  # workers that refused this request, or failed it
    choices: tuple[int, ...] = (0,)  # that share the attempt


@dataclass(frozen=True, slots=True)
class Attach:
    """Tell the decode worker to expect this attempt."""

    worker_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Tell the prefill worker to compute this attempt and hand it to ``decode_id``."""

    worker_id: str
    decode_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell a worker to drop (some choices of) an attempt that it may still be working on."""

    role: Role
    worker_id: str
    attempt: int
    choices: tuple[int, ...] = ()  # empty = all that it still has


class Emit(NamedTuple):
    """New tokens of a choice for the client, each exactly once and in order."""

    position: int
    token_ids: tuple[int, ...]
    choice: int = 0
    scores: tuple[TokenScore, ...] = ()

    def __repr__(self) -> str:
        return f"Emit({self.position}, {len(self.token_ids)} ids, {self.choice})"


@dataclass(frozen=True, slots=True)
class Finish:
    """A choice is complete."""

    reason: FinishReason
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with this error."""

    error: DiptychError


Action = NeedRoute | AwaitWorker | ChooseRoute | Attach | Dispatch | Cancel | Emit | Finish | Fail
