"""The prefill side of the handoff with one decode process, as a state machine: events in, actions out.

The life of an attempt here:

    ASKED      blocks were asked for
    OFFERED    they were granted; nothing is computed yet
    WRITING    the owner took them and computes into them (or pushes copies)
    REVOKED    the decode worker wants them back; the owner was told and may still be writing
    ORPHANED   the link broke under it; the owner was told and may still be writing
    OVER       committed, stopped, refused or withdrawn: nothing of it is kept

Two promises leave this file, Commit and Stopped, and each is made once the owner says that it writes no
more. An Abort for a grant that is not known here is answered with Stopped: what is not kept is not written.
That is also how the two sides agree again after a broken link.
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


class Phase(enum.Enum):
    """Where an attempt is; the file's head tells the story."""

    ASKED = "asked"
    OFFERED = "offered"
    WRITING = "writing"
    REVOKED = "revoked"
    ORPHANED = "orphaned"
    OVER = "over"


_LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.ASKED: frozenset({Phase.OFFERED, Phase.OVER}),
    Phase.OFFERED: frozenset({Phase.WRITING, Phase.OVER}),
    Phase.WRITING: frozenset({Phase.REVOKED, Phase.ORPHANED, Phase.OVER}),
    Phase.REVOKED: frozenset({Phase.ORPHANED, Phase.OVER}),
    Phase.ORPHANED: frozenset({Phase.OVER}),
    Phase.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class _Attempt:
    key: Key
    phase: Phase
    ref: GrantRef | None = None

    def move(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise RuntimeError(f"an attempt cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase


class Sender:
    """One per decode process (address and incarnation); it outlives the streams to it."""

    def __init__(self) -> None:
        self._attempts: dict[Key, _Attempt] = {}
        self.linked = False

    # -- the link

    def link_up(self) -> None:
        """A stream is there (again)."""
        self.linked = True

    def link_lost(self) -> list[SenderAction]:
        """The stream broke: what was asked or offered is over, what is being written must stop."""
        self.linked = False
        asking = [a for a in self._attempts.values() if a.phase in (Phase.ASKED, Phase.OFFERED)]
        writing = [a for a in self._attempts.values() if a.phase in (Phase.WRITING, Phase.REVOKED)]
        for attempt in asking:
            self._forget(attempt)
        for attempt in writing:
            attempt.move(Phase.ORPHANED)
        return [LinkLost(tuple(a.key for a in asking), tuple(_granted(a) for a in writing))]

    # -- the owner's side

    def ask(self, key: Key) -> list[SenderAction]:
        """Ask for blocks. ValueError if this attempt is known already."""
        if key in self._attempts:
            raise ValueError("blocks for this attempt were asked for already")
        self._attempts[key] = _Attempt(key, Phase.ASKED)
        return [SendAsk(key)]

    def withdraw(self, key: Key) -> list[SenderAction]:
        """The owner does not want the blocks any more and never took them. A no-op when it is over."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.phase not in (Phase.ASKED, Phase.OFFERED):
            return []
        self._forget(attempt)
        return [SendWithdrawal(key) if attempt.ref is None else SendStopped(attempt.ref)]

    def take(self, key: Key) -> bool:
        """The owner starts to write. False: the offer was revoked meanwhile."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.phase is not Phase.OFFERED:
            return False
        attempt.move(Phase.WRITING)
        return True

    def writing(self, ref: GrantRef) -> bool:
        """Whether the owner holds this grant and nobody wants it back."""
        attempt = self._find(ref)
        return attempt is not None and attempt.phase is Phase.WRITING

    def push(
        self, ref: GrantRef, first_block: int, num_blocks: int, digests: Sequence[bytes] = ()
    ) -> list[SenderAction]:
        """Blocks are written. Nothing is said of a grant that was revoked."""
        return [SendPushed(ref, first_block, num_blocks, tuple(digests))] if self.writing(ref) else []

    def commit(
        self, ref: GrantRef, num_tokens: int, first_tokens: FirstTokens, note: object = None
    ) -> tuple[bool, list[SenderAction]]:
        """All is written. False: it was revoked before; the promise to stop is made all the same."""
        if not self.writing(ref):
            return False, self.stop(ref)
        self._forget(self._attempts[ref.key])
        return True, [SendCommit(ref, num_tokens, first_tokens, note)]

    def stop(self, ref: GrantRef, reason: int | None = None, message: str = "") -> list[SenderAction]:
        """The owner will not write to this grant again. A no-op when it is over."""
        attempt = self._find(ref)
        if attempt is None:
            return []
        self._forget(attempt)
        return [SendStopped(ref, reason, message)] if self.linked else []

    # -- the decode worker's side

    def granted(self, ref: GrantRef, block_ids: Sequence[int], cached_tokens: int) -> list[SenderAction]:
        """Blocks were granted; if nobody waits for them they go straight back."""
        attempt = self._attempts.get(ref.key)
        if attempt is None or attempt.phase is not Phase.ASKED:
            return [SendStopped(ref)]
        attempt.ref = ref
        attempt.move(Phase.OFFERED)
        return [GrantReceived(ref, tuple(block_ids), cached_tokens)]

    def denied(self, key: Key, reason: int | None, message: str) -> list[SenderAction]:
        """The ask was refused."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.phase is not Phase.ASKED:
            return []
        self._forget(attempt)
        return [GrantDenied(key, reason, message)]

    def abort(self, ref: GrantRef) -> list[SenderAction]:
        """The decode worker wants the blocks back; an owner who did not take them yet is refused them."""
        attempt = self._find(ref)
        if attempt is None:
            return [SendStopped(ref)]
        if attempt.phase is Phase.OFFERED:
            self._forget(attempt)
            return [SendStopped(ref), GrantDenied(ref.key, None, "the blocks were taken back")]
        if attempt.phase is Phase.WRITING:
            attempt.move(Phase.REVOKED)
            return [GrantRevoked(ref)]
        return []

    def held(self) -> list[GrantRef]:
        """Grants to which the owner may be writing now. For checks."""
        owned = (Phase.WRITING, Phase.REVOKED, Phase.ORPHANED)
        return [_granted(a) for a in self._attempts.values() if a.phase in owned]

    def _find(self, ref: GrantRef) -> _Attempt | None:
        attempt = self._attempts.get(ref.key)
        return attempt if attempt is not None and attempt.ref == ref else None

    def _forget(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.key]
        attempt.move(Phase.OVER)


def _granted(attempt: _Attempt) -> GrantRef:
    if attempt.ref is None:
        raise RuntimeError(f"an attempt that is {attempt.phase.value} has no grant")
    return attempt.ref
