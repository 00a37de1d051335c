"""The decode worker as a writer of its own pool: grants for prompts that it computes itself.

To `Receiver` it is a writer like any other, in place and linked for as long as the process lives. So asks
wait in the one queue for blocks, a grant can be revoked, and blocks of one that is revoked during a step stay
in quarantine until `stop` follows that step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.messages import (
    ActionQueue,
    FenceWriter,
    FirstTokens,
    GrantRef,
    Key,
    ReceiverAction,
    SendAbort,
    SendDenied,
    SendGrant,
    WriterId,
)
from kvtransfer.protocol.receiver import Receiver

NAME = "local"
"""Stands for the name of a transport where the decode worker computed a prompt itself."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CommitNote:
    """Phase times of a commit, and its arrival."""

    times: work_pb2.PhaseTimes
    received_at: float


@dataclass(frozen=True, slots=True)
class LocalListener:
    """Callbacks of the grants, called on the event loop.

    `granted` gives blocks for all of an attempt's tokens. `revoked(ref)` asks for `stop`, once no step writes
    to the grant. An ask that is denied ends with its attempt.
    """

    granted: Callable[[SendGrant], None]
    revoked: Callable[[GrantRef], None]


class LocalWriter:
    """The sender's half of the protocol for one process that is sender and receiver."""

    def __init__(
        self, identity: WriterId, receiver: Receiver, actions: ActionQueue[ReceiverAction], chunk: int = 0
    ) -> None:
        self.id = identity
        self.listener: LocalListener | None = None
        self._receiver = receiver
        self._actions = actions
        actions.run(receiver.link_up(identity, in_place=True, transport=NAME, chunk=chunk))

    def ask(self, key: Key) -> None:
        """Ask for the blocks of an attached attempt."""
        self._actions.run(self._receiver.ask(self.id, key))

    def commit(
        self, ref: GrantRef, num_tokens: int, first_tokens: FirstTokens, times: work_pb2.PhaseTimes
    ) -> None:
        """End a grant whose tokens are all computed: its blocks are handed off, unless it was revoked."""
        note = CommitNote(times, time.monotonic())
        self._actions.run(self._receiver.commit(self.id, ref, num_tokens, first_tokens, note))

    def stop(self, ref: GrantRef, reason: int | None = None, message: str = "") -> None:
        """Promise that no step writes to a grant any more, and fail its attempt if it was not revoked."""
        self._actions.run(self._receiver.stopped(self.id, ref, reason, message))

    def perform(self, action: SendGrant | SendDenied | SendAbort | FenceWriter) -> None:
        """Perform an action of the receiver for this writer."""
        if self.listener is None:
            raise RuntimeError("no listener takes the grants of local prefills")
        match action:
            case SendGrant():
                self.listener.granted(action)
            case SendAbort(_, ref):
                self.listener.revoked(ref)
            case SendDenied():
                pass  # the attempt ends, and its owner learns of that
            case FenceWriter(_, why):
                _log.error("a step of this worker does not end: %s", why)
