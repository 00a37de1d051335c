"""The events and actions of the request's state machines: plain frozen values, no protobuf, no clock.

An event goes in, actions come out, and the request's driver carries them out. A message about an attempt
carries the attempt's number: a late one about an earlier attempt is recognised by it and dropped. An event
that concerns some choices of a request carries their indices; any other concerns all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.runtime.errors import DiptychError
from gateway.attempt.types import AttemptEvent, EncoderRoute, FinishReason, LocalPrefill, Role, TokenLogprob
from gateway.attempt.work import Attempt

# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """Admission of choices by the gateway's bounded queue. Empty ``choices``: all of them."""

    choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Routed:
    """The answer to `ChooseRoute`: the pair of workers; without a prefill worker ``local`` says why."""

    prefill_id: str | None
    decode_id: str
    choices: tuple[int, ...] = (0,)  # as in the question
    local: LocalPrefill = LocalPrefill.NO
    encoder: EncoderRoute | None = None  # None: there are no images, or the prefill worker encodes them


@dataclass(frozen=True, slots=True)
class NoRoute:
    """The answer to `ChooseRoute` when no worker of this role can take the attempt."""

    role: Role
    choices: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Launched:
    """The start of attempt ``attempt``, of which a choice is part from now on."""

    attempt: int
    prefill_id: str | None  # None: the decode worker computes the prompt itself
    decode_id: str
    encode_id: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """The loss of the link to a worker, and of all work that the worker had of this request.

    ``graceful``: the worker had announced its shutdown, or never received the request. It counts as no death.
    """

    worker_id: str
    graceful: bool = False


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A new link to a worker.

    ``same_process``: the process that was lost is back, so it had not died. Otherwise another process is in
    its place, which may have an id of its own.
    """

    worker_id: str
    same_process: bool = False


@dataclass(frozen=True, slots=True)
class OutputRestored:
    """Tokens of a choice that the client has already, from a stream that broke; comes before any other event.

    ``reason`` is set when the output is complete with them, and only its end was lost.
    """

    token_ids: tuple[int, ...] = field(repr=False)
    choice: int = 0
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class WaitExpired:
    """The end of the time of an `AwaitWorker`; ``attempt`` is the action's."""

    choice: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A complete stop string after the first ``output_tokens`` tokens of a choice's output."""

    output_tokens: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ProofPending:
    """The router's answer after a loss: workers are linked, but none was heard of since."""

    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RouteAgain:
    """The end of the pause after `ProofPending`."""

    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimeLimitReached:
    """The request's own soft limit: it finishes with the output that it has."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline of the gRPC call."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A CancelRequest call: the request finishes with the output that it has."""


@dataclass(frozen=True, slots=True)
class ShuttingDown:
    """The end of this gateway's shutdown timeout."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The end of the call: the caller cancelled or disconnected, or has its answer."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A failure of the request as a whole: a bug in the gateway or a worker, or another choice's failure."""

    error: DiptychError


Event = (
    Admitted
    | Routed
    | NoRoute
    | ProofPending
    | RouteAgain
    | Launched
    | AttemptEvent
    | WorkerDown
    | WorkerUp
    | OutputRestored
    | WaitExpired
    | StopMatched
    | TimeLimitReached
    | DeadlinePassed
    | CancelRequested
    | ShuttingDown
    | ClientGone
    | RequestFailed
)

# --- actions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NeedRoute:
    """The need of a choice for an attempt; `RequestState` turns it into `ChooseRoute`."""

    choice: int


@dataclass(frozen=True, slots=True)
class AwaitWorker:
    """A timer: no worker can take the choice now. Apply `WaitExpired` after ``seconds``."""

    choice: int
    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AwaitProof:
    """A timer: apply `RouteAgain` after a short pause."""

    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChooseRoute:
    """A question to the router: the pair of workers for these tokens. Answer with `Routed` or `NoRoute`."""

    token_ids: tuple[int, ...] = field(repr=False)  # prompt, then delivered tokens
    avoid: frozenset[str]  # workers that refused this request, or failed it
    choices: tuple[int, ...] = (0,)  # that share the attempt
    remote: bool = False  # a decode worker has answered that too many tokens are new for it


@dataclass(frozen=True, slots=True)
class Attach:
    """A message to the decode worker: expect this attempt."""

    worker_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A message to the prefill worker: compute this attempt and send its KV blocks to ``decode_id``."""

    worker_id: str
    decode_id: str
    attempt: Attempt
    encoder: EncoderRoute | None = None  # it has the images


@dataclass(frozen=True, slots=True)
class Encode:
    """A message to the encode worker: the images of this attempt, for its prefill worker."""

    worker_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Cancel:
    """A message to a worker: drop (some choices of) an attempt."""

    role: Role
    worker_id: str
    attempt: int
    choices: tuple[int, ...] = ()  # empty = all that the worker still has


class Emit(NamedTuple):
    """New tokens of a choice for the client, each exactly once and in order."""

    position: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()

    def __repr__(self) -> str:
        return f"Emit({self.position}, {len(self.token_ids)} ids, {self.choice})"


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice that is complete."""

    reason: FinishReason
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """The end of the request with this error."""

    error: DiptychError


Action = (
    NeedRoute
    | AwaitWorker
    | AwaitProof
    | ChooseRoute
    | Attach
    | Encode
    | Dispatch
    | Cancel
    | Emit
    | Finish
    | Fail
)
