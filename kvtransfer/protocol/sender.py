"""State machine of the prefill side towards one decode process: events in, actions out, no I/O, no clock.

Phases of an attempt:

    ASKED      blocks were asked for
    GRANTED    blocks were granted; the owner has not started to write
    WRITING    the owner computes into the blocks, or pushes copies; before that it may pull their prefix
    REVOKED    the decode worker sent Abort; the owner knows and may still be writing
    ORPHANED   the link broke; the owner knows and may still be writing
    OVER       committed, stopped, denied or withdrawn; nothing of the attempt is kept

Two promises leave this file, Commit and Stopped, and each is made once the owner says that it writes no more.
An Abort for a grant that is not known here is answered with Stopped: what is not kept is not written. By that
the two sides also agree again after a broken link.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.protocol.messages import (
    FirstTokens,
    GrantDenied,
    GrantReceived,
    GrantRef,
    GrantRevoked,
    Key,
    LinkLost,
    SendAsk,
    SendCommit,
    SenderAction,
    SendPushed,
    SendStopped,
    SendWithdrawal,
)


class SenderPhase(enum.Enum):
    """Phase of an attempt on the prefill side, as listed at the head of this file."""

    ASKED = "asked"
    GRANTED = "granted"
    WRITING = "writing"
    REVOKED = "revoked"
    ORPHANED = "orphaned"
    OVER = "over"


TRANSITIONS: dict[SenderPhase, frozenset[SenderPhase]] = {
    SenderPhase.ASKED: frozenset({SenderPhase.GRANTED, SenderPhase.OVER}),
    SenderPhase.GRANTED: frozenset({SenderPhase.WRITING, SenderPhase.OVER}),
    SenderPhase.WRITING: frozenset({SenderPhase.REVOKED, SenderPhase.ORPHANED, SenderPhase.OVER}),
    SenderPhase.REVOKED: frozenset({SenderPhase.ORPHANED, SenderPhase.OVER}),
    SenderPhase.ORPHANED: frozenset({SenderPhase.OVER}),
    SenderPhase.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class _Attempt:
    key: Key
    phase: SenderPhase
    ref: GrantRef | None = None

    def move(self, phase: SenderPhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"an attempt cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase


class Sender:
    """State machine towards one decode process (address and incarnation); it outlives the streams to it."""

    def __init__(self) -> None:
        self._attempts: dict[Key, _Attempt] = {}
        self.linked = False

    # -- the link

    def link_up(self) -> None:
        """Record that a stream is there, for the first time or again."""
        self.linked = True

    def link_lost(self) -> list[SenderAction]:
        """End asked and granted attempts after the stream broke, and orphan those that are being written."""
        self.linked = False
        asking = [a for a in self._attempts.values() if a.phase in (SenderPhase.ASKED, SenderPhase.GRANTED)]
        writing = [
            a for a in self._attempts.values() if a.phase in (SenderPhase.WRITING, SenderPhase.REVOKED)
        ]
        for attempt in asking:
            self._forget(attempt)
        for attempt in writing:
            attempt.move(SenderPhase.ORPHANED)
        return [LinkLost(tuple(a.key for a in asking), tuple(_require_ref(a) for a in writing))]

    # -- the owner's side

    def ask(self, key: Key) -> list[SenderAction]:
        """Ask for blocks. Raises ValueError for an attempt that asked before."""
        if key in self._attempts:
            raise ValueError("blocks for this attempt were asked for already")
        self._attempts[key] = _Attempt(key, SenderPhase.ASKED)
        return [SendAsk(key)]

    def withdraw(self, key: Key) -> list[SenderAction]:
        """Take an ask or an untouched grant back. A no-op when the attempt is over."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.phase not in (SenderPhase.ASKED, SenderPhase.GRANTED):
            return []
        self._forget(attempt)
        return [SendWithdrawal(key) if attempt.ref is None else SendStopped(attempt.ref)]

    def start_writing(self, key: Key) -> bool:
        """Move a granted attempt to WRITING; False if the grant was revoked meanwhile."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.phase is not SenderPhase.GRANTED:
            return False
        attempt.move(SenderPhase.WRITING)
        return True

    def is_writing(self, ref: GrantRef) -> bool:
        """Return True while the owner may write to this grant and the decode worker has not revoked it."""
        attempt = self._find(ref)
        return attempt is not None and attempt.phase is SenderPhase.WRITING

    def push(
        self, ref: GrantRef, first_block: int, num_blocks: int, digests: Sequence[bytes] = ()
    ) -> list[SenderAction]:
        """Announce blocks that are written; nothing for a revoked grant."""
        return [SendPushed(ref, first_block, num_blocks, tuple(digests))] if self.is_writing(ref) else []

    def commit(
        self, ref: GrantRef, num_tokens: int, first_tokens: FirstTokens, note: object = None
    ) -> tuple[bool, list[SenderAction]]:
        """End the handoff of a written grant; False, with the promise to stop, if it was revoked."""
        if not self.is_writing(ref):
            return False, self.stop(ref)
        self._forget(self._attempts[ref.key])
        return True, [SendCommit(ref, num_tokens, first_tokens, note)]

    def stop(self, ref: GrantRef, reason: int | None = None, message: str = "") -> list[SenderAction]:
        """Promise that the owner writes to this grant no more. A no-op when the attempt is over."""
        attempt = self._find(ref)
        if attempt is None:
            return []
        self._forget(attempt)
        return [SendStopped(ref, reason, message)] if self.linked else []

    # -- the decode worker's side

    def granted(
        self, ref: GrantRef, block_ids: Sequence[int], cached_tokens: int, window_pins: Sequence[int] = ()
    ) -> list[SenderAction]:
        """Take a grant; send it straight back if no attempt waits for it."""
        attempt = self._attempts.get(ref.key)
        if attempt is None or attempt.phase is not SenderPhase.ASKED:
            return [SendStopped(ref)]
        attempt.ref = ref
        attempt.move(SenderPhase.GRANTED)
        return [GrantReceived(ref, tuple(block_ids), cached_tokens, tuple(window_pins))]

    def denied(self, key: Key, reason: int | None, message: str) -> list[SenderAction]:
        """End an attempt whose ask was denied."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.phase is not SenderPhase.ASKED:
            return []
        self._forget(attempt)
        return [GrantDenied(key, reason, message)]

    def abort(self, ref: GrantRef) -> list[SenderAction]:
        """Revoke a grant that the decode worker wants back; deny it to an owner that is not writing."""
        attempt = self._find(ref)
        if attempt is None:
            return [SendStopped(ref)]
        if attempt.phase is SenderPhase.GRANTED:
            self._forget(attempt)
            return [SendStopped(ref), GrantDenied(ref.key, None, "the blocks were taken back")]
        if attempt.phase is SenderPhase.WRITING:
            attempt.move(SenderPhase.REVOKED)
            return [GrantRevoked(ref)]
        return []

    def held_grants(self) -> list[GrantRef]:
        """Return the grants to which the owner may be writing now. For checks."""
        owned = (SenderPhase.WRITING, SenderPhase.REVOKED, SenderPhase.ORPHANED)
        return [_require_ref(a) for a in self._attempts.values() if a.phase in owned]

    def _find(self, ref: GrantRef) -> _Attempt | None:
        attempt = self._attempts.get(ref.key)
        return attempt if attempt is not None and attempt.ref == ref else None

    def _forget(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.key]
        attempt.move(SenderPhase.OVER)


def _require_ref(attempt: _Attempt) -> GrantRef:
    if attempt.ref is None:
        raise RuntimeError(f"an attempt that is {attempt.phase.value} has no grant")
    return attempt.ref
