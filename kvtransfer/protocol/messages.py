"""The words of the handoff: who, which grant, and what the state machines ask their drivers to do.

Plain values. Protobuf and sockets are the drivers' business, so that a simulator can stand in for them.
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
"""What the writer sampled from the last token's logits; the protocol carries it and does not look inside."""


class WriterId(NamedTuple):
    """A prefill process. A restarted worker has another incarnation and is another writer."""

    worker_id: str
    incarnation: int


class GrantRef(NamedTuple):
    """The name of one grant. Generations grow at every grant, so that an old one is never mistaken."""

    key: Key
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class PendingTransfer:
    """What the gateway's attach says of an attempt before its prefill asks for blocks."""

    key: Key
    num_tokens: int
    """Tokens to be prefilled; at least 1."""
    keys: Sequence[bytes]
    """Hash of each full block of those tokens; empty when the prefix cache must not be read."""
    reserve_blocks: int | None = None
    """Hold this many blocks (the attempt's worst case), not only those of the prefill."""
    sequences: int = 1
    """How many sequences will go on from those tokens, each with blocks of its own."""
    priority: int = 0
    """Of those that wait for blocks, a higher one is served first."""


# -- what the receiving side asks of its driver


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Tell the writer that it may fill `block_ids`, whose first `cached_tokens` tokens are there already."""

    writer: WriterId
    ref: GrantRef
    block_ids: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SendDenied:
    """Tell the writer that its ask will not be granted; `reason` is a FailureReason of the protocol.

    None: the attempt ended here, and who attached it knows why.
    """

    writer: WriterId
    key: Key
    reason: int | None
    message: str


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Ask the writer to stop and to say so."""

    writer: WriterId
    ref: GrantRef


@dataclass(frozen=True, slots=True)
class Handoff:
    """The blocks are complete and verified: they belong to the driver's owner now, references included."""

    writer: WriterId
    ref: GrantRef
    block_ids: list[int]
    cached_tokens: int
    num_tokens: int
    first_tokens: FirstTokens
    in_place: bool
    note: object
    """What the driver gave with the commit."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The attempt's handoff is over without blocks; `reason` is a FailureReason of the protocol."""

    key: Key
    reason: int
    message: str


@dataclass(frozen=True, slots=True)
class FenceWriter:
    """Make sure that this writer can write no more, and report it dead when that is proven."""

    writer: WriterId
    why: str


ReceiverAction = SendGrant | SendDenied | SendAbort | Handoff | Fail | FenceWriter


# -- what the sending side asks of its driver


@dataclass(frozen=True, slots=True)
class SendAsk:
    """Ask for blocks."""

    key: Key


@dataclass(frozen=True, slots=True)
class SendWithdrawal:
    """Take an ask back that was not answered yet."""

    key: Key


@dataclass(frozen=True, slots=True)
class SendStopped:
    """Promise that no further write of this grant comes; `reason` when the prefill gave up by itself."""

    ref: GrantRef
    reason: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class SendPushed:
    """Say that blocks `first_block ..` of the grant are written."""

    ref: GrantRef
    first_block: int
    num_blocks: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SendCommit:
    """End the handoff and promise that no further write comes."""

    ref: GrantRef
    num_tokens: int
    first_tokens: FirstTokens
    note: object
    """What the driver gave with the commit."""


@dataclass(frozen=True, slots=True)
class GrantReceived:
    """Blocks were granted; `take` them, or they are given back when the link or the ask ends."""

    ref: GrantRef
    block_ids: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class GrantDenied:
    """An ask is over without blocks; no `reason` when the attempt ended at the decode worker."""

    key: Key
    reason: int | None
    message: str


@dataclass(frozen=True, slots=True)
class GrantRevoked:
    """Stop computing this attempt, then say `stop`."""

    ref: GrantRef


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link is gone: asks of `asking` are over; the grants of `writing` are void, `stop` each in time."""

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


class ActionPump(Generic[Action]):
    """Calls `perform` for each action, never from within another action."""

    def __init__(self, perform: Callable[[Action], None]) -> None:
        self._perform = perform
        self._pending: deque[Action] = deque()
        self._running = False

    def run(self, actions: Iterable[Action]) -> None:
        """Perform them now, or after those that are being performed.

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
