"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_UCRED = struct.Struct("iII")


class PeerCredentials(NamedTuple):
    """Who opened the other end, by the kernel's word."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Of a connected socket: of the process that connected, or of the one that listened."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return PeerCredentials(*_UCRED.unpack(raw))
