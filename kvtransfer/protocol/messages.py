"""Values of the handoff protocol: names of writers and grants, and the actions of the two state machines.

Plain values, so that a simulator can stand in for protobuf and sockets, which are the drivers' business.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Key = tuple[str, int]
"""(request id, attempt)"""

FirstTokens = tuple[object, ...]
"""Tokens sampled by the writer from the last token's logits; opaque to the protocol."""


class WriterId(NamedTuple):
    """Identity of a prefill process. A restarted worker has another incarnation and is another writer."""

    worker_id: str
    incarnation: int


class GrantRef(NamedTuple):
    """Name of one grant. Generations grow at every grant, so that an old name never fits a new one."""

    key: Key
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """Attempt that the gateway attached and whose prefill will ask for blocks."""

    key: Key
    num_tokens: int
    """Tokens to be prefilled; at least 1."""
    keys: Sequence[bytes]
    """Hash of each full block of those tokens; empty when the prefix cache must not be read."""
    reserve_blocks: int | None = None
    """Number of blocks to hold (the attempt's worst case); None: only those of the prefill."""
    sequences: int = 1
    """Number of sequences that will go on from those tokens, each with blocks of its own."""
    priority: int = 0
    """A waiting attempt of higher priority is served first."""
    reserve_windowed: int = 0
    """Number of windowed blocks to hold for its sequences beside the prompt's, with `reserve_blocks`."""


# -- actions of the receiver


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Message to the writer: it may fill these blocks, whose first `cached_tokens` tokens are there."""

    writer: WriterId
    ref: GrantRef
    block_ids: tuple[int, ...]
    cached_tokens: int
    window_pins: tuple[int, ...] = ()
    """Windowed blocks of the cached prefix, where layers with a window have blocks of their own."""


@dataclass(frozen=True, slots=True)
class SendDenied:
    """Message to the writer: its ask is denied; `reason` is a FailureReason of the wire.

    None: the attempt ended at this worker, and the gateway knows why.
    """

    writer: WriterId
    key: Key
    reason: int | None
    message: str


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Message to the writer: stop writing to this grant and answer with Stopped."""

    writer: WriterId
    ref: GrantRef


@dataclass(frozen=True, slots=True)
class Handoff:
    """Complete and verified blocks, which belong to the owner of the driver now, references included."""

    writer: WriterId
    ref: GrantRef
    block_ids: list[int]
    cached_tokens: int
    num_tokens: int
    first_tokens: FirstTokens
    in_place: bool
    note: object
    """Opaque value that the driver gave with the commit."""
    window_pins: tuple[int, ...] = ()
    """Windowed blocks of the cached prefix."""
    window_blocks: tuple[int, ...] = ()
    """The writer's ring of windowed blocks (`PromptWindow.ring`); `block_ids` has none."""

    @property
    def held(self) -> list[int]:
        """Return all blocks, those of the window included."""
        return [*self.block_ids, *self.window_pins, *dict.fromkeys(self.window_blocks)]


@dataclass(frozen=True, slots=True)
class Fail:
    """End of an attempt without blocks; `reason` is a FailureReason of the wire."""

    key: Key
    reason: int
    message: str


@dataclass(frozen=True, slots=True)
class FenceWriter:
    """Order to fence this writer, and to report it dead when it is proven that it can write no more."""

    writer: WriterId
    why: str


ReceiverAction = SendGrant | SendDenied | SendAbort | Handoff | Fail | FenceWriter


# -- actions of the sender


@dataclass(frozen=True, slots=True)
class SendAsk:
    """Message to the decode worker: blocks are wanted for this attempt."""

    key: Key


@dataclass(frozen=True, slots=True)
class SendWithdrawal:
    """Message to the decode worker: an unanswered ask is withdrawn."""

    key: Key


@dataclass(frozen=True, slots=True)
class SendStopped:
    """Message to the decode worker: no further write of this grant comes; `reason` if the prefill gave up."""

    ref: GrantRef
    reason: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class SendPushed:
    """Message to the decode worker: `num_blocks` blocks of the grant, from `first_block` on, are written."""

    ref: GrantRef
    first_block: int
    num_blocks: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Message to the decode worker: all is written, with the promise that no further write comes."""

    ref: GrantRef
    num_tokens: int
    first_tokens: FirstTokens
    note: object
    """Opaque value that the driver gave with the commit."""


@dataclass(frozen=True, slots=True)
class GrantReceived:
    """Granted blocks for the owner, which calls `start_writing`; else they return when link or ask ends."""

    ref: GrantRef
    block_ids: tuple[int, ...]
    cached_tokens: int
    window_pins: tuple[int, ...] = ()
    """Windowed blocks of the cached prefix."""


@dataclass(frozen=True, slots=True)
class GrantDenied:
    """End of an ask without blocks; no `reason` if the attempt ended at the decode worker."""

    key: Key
    reason: int | None
    message: str


@dataclass(frozen=True, slots=True)
class GrantRevoked:
    """Order for the owner to stop computing this attempt and then to call `stop`."""

    ref: GrantRef


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Loss of the link: the asks of `asking` are over; each grant of `writing` is void and needs `stop`."""

    asking: tuple[Key, ...]
    writing: tuple[GrantRef, ...]


SenderAction = (
    SendAsk
    | SendWithdrawal
    | SendStopped
    | SendPushed
    | SendCommit
    | GrantReceived
    | GrantDenied
    | GrantRevoked
    | LinkLost
)


Action = TypeVar("Action")
_log = logging.getLogger(__name__)


class ActionQueue(Generic[Action]):
    """Queue that performs actions one by one, in the order in which they were decided.

    `perform` is never called from within another action. A callback may cause further events, whose actions
    wait behind those that were decided before: were an Abort to overtake the Grant that it revokes, the
    writer would deny the grant and then receive it.
    """

    def __init__(self, perform: Callable[[Action], None]) -> None:
        self._perform = perform
        self._pending: deque[Action] = deque()
        self._running = False

    def run(self, actions: Iterable[Action]) -> None:
        """Perform actions now, or after those that are being performed.

        An action that raises is logged, and the rest goes on: one request's error must not keep another
        request's blocks.
        """
        self._pending.extend(actions)
        if self._running:
            return
        self._running = True
        try:
            while self._pending:
                action = self._pending.popleft()
                try:
                    self._perform(action)
                except Exception:
                    _log.exception("%s failed", type(action).__name__)
        finally:
            self._running = False
