"""Messages between a worker and the holder of packed weights, over an abstract Unix socket of sequenced
packets.

    worker → "get KEY"
    holder → "file" with a file descriptor      it is there: the connection is a lease from now on
           | "pack"                             this worker is to make it
           | nothing yet                        another worker makes it
    worker → "done" with a file descriptor      sealed; the holder answers "kept" or "refused"
           | "offer KEY" with a file descriptor of a worker whose holder died; answered alike

A connection that closes is a lease that ends; where it was to pack, the next worker that waits is told to.
The socket leaves no file behind, and both ends take processes of their own user only.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from typing import Final

from diptych.runtime.peer_credentials import peer_credentials

MESSAGE_BYTES: Final = 256
FILE, PACK, KEPT, REFUSED, DONE = b"file", b"pack", b"kept", b"refused", b"done"
_GET, _OFFER = b"get ", b"offer "
_KEY = re.compile(rb"[0-9a-f]{64}")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def get_message(key: str) -> bytes:
    """Return the message that asks for the file of `key`."""
    return _GET + key.encode()


def offer_message(key: str) -> bytes:
    """Return the message that offers the file of `key`."""
    return _OFFER + key.encode()


def asked_key(message: bytes) -> str | None:
    """Return the key that a message asks for, None for another message."""
    return _key_behind(_GET, message)


def offered_key(message: bytes) -> str | None:
    """Return the key of the file that comes with a message, None for another message."""
    return _key_behind(_OFFER, message)


def _key_behind(begin: bytes, message: bytes) -> str | None:
    key = message.removeprefix(begin)
    return key.decode() if message.startswith(begin) and _KEY.fullmatch(key) else None


def is_sealed(file: int) -> bool:
    """Return whether a file can never change: only such a one is whole."""
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS and os.fstat(file).st_size > 0
    except OSError:
        return False


def same_user(connection: socket.socket) -> bool:
    """Return whether the other end is a process of this one's user."""
    return peer_credentials(connection).uid == os.geteuid()
