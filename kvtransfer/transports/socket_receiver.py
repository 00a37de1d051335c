"""The decode worker's end of every transport whose data comes by sockets: listen, admit, and cut off.

What the frames mean is the business of whoever reads them (`tcp`, `paired`). Closing a data socket is the
fence, and the proof: nothing that it brought is copied from that moment on.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import Place, ReceiverHooks
from kvtransfer.transports.data_listener import DataListener, DataSocket, Frames

OpenFrames = Callable[[WriterId, DataSocket], Frames]


def reaches_everywhere(writer: Place) -> str | None:
    """No place is out of reach of a socket."""
    return None


class SocketReceiver:
    """One data socket for each writer.

    Args:
        open_frames: makes the reader of a writer's frames.
        unreachable: why a writer at a place cannot come this way, None if it can.
    """

    in_place = False

    def __init__(
        self,
        name: str,
        host: str,
        open_frames: OpenFrames,
        hooks: ReceiverHooks,
        unreachable: Callable[[Place], str | None] = reaches_everywhere,
    ) -> None:
        self.name = name
        self.unreachable = unreachable
        self._listener = DataListener(host, open_frames, hooks.dead)

    async def start(self) -> None:
        """Listen on a free port. Raises OSError."""
        await self._listener.start()

    @property
    def endpoint(self) -> str:
        """host:port of the data sockets."""
        return self._listener.endpoint

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let whoever shows the token write as `writer`; the pid means nothing across hosts."""
        return self._listener.admit(writer)

    def registered(self, writer: WriterId) -> bool:
        """Whether its data socket is open."""
        return self._listener.registered(writer)

    def fence(self, writer: WriterId) -> None:
        """Close the data socket, which is the proof."""
        self._listener.end(writer)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """The frames say it themselves."""

    def link_lost(self, writer: WriterId) -> None:
        """Without a stream the data has no meaning: close it."""
        self._listener.end(writer)

    async def close(self) -> None:
        """Stop listening and end every data socket."""
        await self._listener.close()
