"""The workers of a choice's current attempt: which may still be busy with it, and which of them failed.

Pure: workers are named by their ids, and time is an argument.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.attempt.types import TEXT_ROLES, Cause, Role
from gateway.session.events import Launched


class LostWorker(NamedTuple):
    """A worker that was lost at ``at`` seconds with an attempt that it had had since ``since``."""

    worker_id: str
    at: float
    since: float


class Blame(NamedTuple):
    """The worker that failed, and whether it counts as dead once this gateway loses it, too."""

    worker_id: str
    suspect: bool = False


class AttemptWorkers:
    """The workers of one attempt.

    Attributes:
        busy: by role, those without a terminal message.
        pair: by role, those that have, or had, the attempt.
        launched_at: when they got it, in seconds.
    """

    def __init__(self, launched: Launched | None = None, *, now: float) -> None:
        self.launched_at = now
        self.busy: dict[Role, str] = {}
        if launched is not None:
            self.busy[Role.DECODE] = launched.decode_id
            if launched.prefill_id is not None:
                self.busy[Role.PREFILL] = launched.prefill_id
            if launched.encode_id is not None:
                self.busy[Role.ENCODE] = launched.encode_id
        self.pair = dict(self.busy)

    def end(self, role: Role) -> str | None:
        """Note a role's terminal message. Return its worker; None if its message came before."""
        return self.busy.pop(role, None)

    def lose(self, worker_id: str, now: float) -> LostWorker:
        """Note that a worker is lost."""
        self.busy = {role: busy for role, busy in self.busy.items() if busy != worker_id}
        return LostWorker(worker_id, now, self.launched_at)

    def decode_begun(self, *, decoding: bool) -> bool:
        """Return whether the decode worker may have begun: before it has all blocks it only keeps room."""
        return decoding or Role.PREFILL not in self.busy

    def blame(self, cause: Cause, reporter: str, role: Role | None, *, decoding: bool) -> Blame:
        """Return the worker that failed, where ``reporter``, of that role, says that the attempt did.

        Args:
            role: None where this gateway itself lost the reporter.
            decoding: the decode worker has sent tokens.
        """
        if cause is Cause.PEER_LOST:  # the worker that reports it is not the one that failed
            pair = (self.pair.get(text_role) for text_role in TEXT_ROLES)
            peer = next((one for one in pair if one is not None and one != reporter), reporter)
            # A decode worker whose prefill worker has not committed yet has not begun.
            return Blame(peer, suspect=decoding or peer == self.pair.get(Role.PREFILL))
        if cause is Cause.ENCODER_LOST:
            return Blame(self.pair.get(Role.ENCODE, reporter), suspect=True)
        if cause is Cause.COMPUTE_FAILED and not decoding and role is not Role.ENCODE:
            # Whichever of the two reports it: a decode worker computes nothing before its first token.
            return Blame(self.pair.get(Role.PREFILL, reporter))
        return Blame(reporter)
