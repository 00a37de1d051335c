"""Registry of the prefill processes that write here: links, leases and fencing.

A writer stays known for as long as it has a link, or blocks that it might still write. One that does not
answer, or does not stop when it is asked to, must prove its end, which its transport brings about.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from kvtransfer.drivers.codec import Response
from kvtransfer.drivers.links import ServerLink
from kvtransfer.protocol.lease import Lease, LeasePhase, LeaseTimes, Verdict
from kvtransfer.protocol.messages import ActionQueue, ReceiverAction, WriterId
from kvtransfer.protocol.receiver import Receiver
from kvtransfer.transports.base import ReceivingTransport

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Writer:
    """Prefill process, whatever links it came by."""

    id: WriterId
    transport: ReceivingTransport
    """Transport of its last link."""
    lease: Lease
    link: ServerLink | None
    shares_drafter: bool = True
    """True if its blocks have the segments that blocks have here."""
    used: dict[str, ReceivingTransport] = field(default_factory=dict)
    """Transports of all its links, by name: it may still write by an earlier one."""


class WriterRegistry:
    """Known writers; what happens to them are events of `receiver`, and `actions` performs what follows."""

    def __init__(
        self, receiver: Receiver, actions: ActionQueue[ReceiverAction], lease_times: LeaseTimes
    ) -> None:
        self._receiver = receiver
        self._actions = actions
        self._lease_times = lease_times
        self._known: dict[WriterId, Writer] = {}
        self.fenced = 0
        """Number of processes that were fenced since the start."""

    def __len__(self) -> int:
        return len(self._known)

    def is_fenced(self, writer: WriterId) -> bool:
        """Return True if this process must not come back."""
        known = self._known.get(writer)
        return known is not None and known.lease.phase is LeasePhase.FENCED

    def is_linked(self, writer_id: WriterId) -> bool:
        """Return True if this process has a stream."""
        writer = self._known.get(writer_id)
        return writer is not None and writer.link is not None

    def writer_of(self, link: ServerLink) -> Writer | None:
        """Return the writer whose stream this is; None if another stream of the same process took over."""
        writer = self._known.get(link.writer)
        return writer if writer is not None and writer.link is link else None

    def transport_of(self, writer_id: WriterId) -> str:
        """Return the name of the transport that a known writer uses; empty for others."""
        writer = self._known.get(writer_id)
        return "" if writer is None else writer.transport.name

    def shares_drafter(self, writer_id: WriterId) -> bool:
        """Return whether the blocks of a known writer have the segments that blocks have here."""
        writer = self._known.get(writer_id)
        return writer is not None and writer.shares_drafter

    def send(self, writer_id: WriterId, response: Response) -> None:
        """Send a message to a writer; it is dropped without a link."""
        writer = self._known.get(writer_id)
        if writer is not None and writer.link is not None:
            writer.link.put(response)

    def send_to_copying(self, response: Response) -> None:
        """Send a message to every linked writer that copies blocks."""
        for writer in self._known.values():
            if writer.link is not None and not writer.transport.in_place:
                writer.link.put(response)

    def close_links(self) -> None:
        """End every stream from this side."""
        for writer in list(self._known.values()):
            if writer.link is not None:
                writer.link.close()

    def link_up(
        self, link: ServerLink, transport: ReceivingTransport, *, shares_drafter: bool = True
    ) -> Writer:
        """Record the stream of a process; an earlier one of the same process ends."""
        now = time.monotonic()
        known = self._known.get(link.writer)
        if known is not None and known.link is not None:
            known.link.close()
            self.link_lost(known, known.link)
            known = self._known.get(link.writer)
        if known is None:
            known = Writer(link.writer, transport, Lease(now, self._lease_times), link, shares_drafter)
            self._known[link.writer] = known
        else:
            known.link, known.transport = link, transport
            known.lease.link_up(now)
        known.used[transport.name] = transport
        return known

    def link_lost(self, writer: Writer, link: ServerLink) -> None:
        """Record the end of a stream. A no-op if another one took over, or if the end is known."""
        if writer.link is not link:
            return
        writer.link = None
        writer.lease.link_lost(time.monotonic())
        _log.info("prefill worker %s lost its link", writer.id.worker_id)
        self._actions.run(self._receiver.link_lost(writer.id))
        writer.transport.link_lost(writer.id)
        self._forget_if_proven(writer)

    def _forget_if_proven(self, writer: Writer) -> None:
        if writer.link is None and not self._receiver.has_quarantined(writer.id):
            self._known.pop(writer.id, None)

    def writer_dead(self, transport: str, writer_id: WriterId) -> None:
        """Take the proof of a transport that a writer writes no more by it; forget one that writes nowhere.

        Processes of a writer may have registered with a transport that not all of them could use, and a step
        may still run that began with an earlier one: the end of one says nothing of the other.
        """
        self._actions.run(self._receiver.writer_dead(writer_id, transport))
        writer = self._known.get(writer_id)
        if writer is None or (writer.link is not None and writer.transport.name != transport):
            return
        if writer.link is not None:
            writer.link.close()
            self.link_lost(writer, writer.link)
        self._forget_if_proven(writer)

    def fence(self, writer_id: WriterId, why: str) -> None:
        """Cut off a process that must not write again."""
        writer = self._known.get(writer_id)
        if writer is None or writer.lease.phase is LeasePhase.FENCED:
            return
        writer.lease.fence()
        self._expire(writer, why)

    def _expire(self, writer: Writer, why: str) -> None:
        """End the stream of a writer that must not write again, and fence it while it still holds blocks."""
        link = writer.link
        if link is not None:
            link.close()
            self.link_lost(writer, link)
        if self._receiver.has_quarantined(writer.id):
            self.fenced += 1
            _log.warning("prefill worker %s is fenced: %s", writer.id.worker_id, why)
            for transport in self._receiver.quarantined_transports(writer.id):
                writer.used[transport].fence(writer.id)
        else:
            self._known.pop(writer.id, None)

    def tick(self, now: float, beat: Response) -> None:
        """Cut off writers that do not answer, send `beat` to those with a link. Call it every interval."""
        for writer in list(self._known.values()):
            self._tick_writer(writer, now)
            if writer.link is not None:
                writer.link.put(beat)

    def _tick_writer(self, writer: Writer, now: float) -> None:
        verdict = writer.lease.tick(now)
        if verdict is Verdict.SUSPECT:
            _log.warning("prefill worker %s does not answer", writer.id.worker_id)
        elif verdict is Verdict.EXPIRED:
            self._expire(writer, "it does not answer")
        else:
            self._forget_if_proven(writer)
