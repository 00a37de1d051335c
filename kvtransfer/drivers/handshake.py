"""Who may link to this decode worker, by which transport, and what it is told in welcome."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.worker.v1 import handoff_pb2
from kvtransfer.drivers.codec import Response
from kvtransfer.protocol.fingerprint import Fingerprint, incompatible_field
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import Place, ReceivingTransport


class Handshake:
    """Answers hellos in the name of `me`."""

    def __init__(
        self,
        me: WriterId,
        fingerprint: Fingerprint,
        num_blocks: int,
        transports: Sequence[ReceivingTransport],
    ) -> None:
        self._me = me
        self._fingerprint = fingerprint
        self._num_blocks = num_blocks
        self.transports = transports

    def transport_for(self, hello: handoff_pb2.HandoffHello) -> ReceivingTransport | str:
        """The first of the writer's transports that serves both, or the name of what does not fit."""
        field = incompatible_field(self._fingerprint, Fingerprint.from_proto(hello.fingerprint))
        if field is not None:
            return field
        place = Place(hello.host_id, hello.device)
        why = []
        for transport in (t for name in hello.transports for t in self.transports if t.name == name):
            reason = transport.unreachable(place)
            if reason is None:
                return transport
            why.append(f"{transport.name}: {reason}")
        return f"transports ({'; '.join(why) or 'none in common'})"

    def welcome(self, hello: handoff_pb2.HandoffHello, transport: ReceivingTransport) -> Response:
        """Admits the writer to the transport: the token in the answer is its ticket."""
        return Response(
            welcome=handoff_pb2.HandoffWelcome(
                worker_id=self._me.worker_id,
                incarnation=self._me.incarnation,
                fingerprint=self._fingerprint.to_proto(),
                transport=transport.name,
                endpoint=transport.endpoint,
                token=transport.admit(WriterId(hello.worker_id, hello.incarnation), hello.pid),
                num_blocks=self._num_blocks,
            )
        )
