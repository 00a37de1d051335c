"""HTTP/2 by hand (RFC 9113, RFC 7541), for clients that no library would be: only what such a one sends."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4
CANCEL = struct.pack(">I", 8)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def settings(**values: int) -> bytes:
    """Only the window is of use here."""
    payload = b"".join(struct.pack(">HI", INITIAL_WINDOW_SIZE, values[name]) for name in values)
    return frame(SETTINGS, 0, 0, payload)


def literal(name: bytes, value: bytes, *, index: bool = False) -> bytes:
    """A header field with its name; ``index`` puts it into the other end's table."""
    return (b"\x40" if index else b"\x00") + _text(name) + _text(value)


def _text(data: bytes) -> bytes:
    """No Huffman coding; RFC 7541, 5.1 and 5.2."""
    size, head = len(data), b""
    if size < 127:
        return bytes([size]) + data
    head, size = b"\x7f", size - 127
    while size >= 128:
        head, size = head + bytes([size % 128 + 128]), size // 128
    return head + bytes([size]) + data


def call(method: str) -> bytes:
    """The header block of a gRPC call."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": method.encode(),
        b":authority": b"x",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    return b"".join(literal(name, value) for name, value in fields.items())


def message(data: bytes) -> bytes:
    """One gRPC message, not compressed."""
    return b"\x00" + struct.pack(">I", len(data)) + data


@contextlib.contextmanager
def connection(address: str, **window: int) -> Iterator[socket.socket]:
    """The preface and the settings are sent; what the server says is not read."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as made:
        made.sendall(PREFACE + settings(**window))
        yield made


@contextlib.contextmanager
def plain(address: str) -> Iterator[socket.socket]:
    """TCP, and nothing sent."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as made:
        yield made


def push(made: socket.socket, data: bytes) -> bool:
    """Send all of it; False when the server has closed, or reads no more for two seconds."""
    made.settimeout(2)
    try:
        made.sendall(data)
    except OSError:
        return False
    return True


def closed(made: socket.socket, within_s: float = 20) -> bool:
    """Whether the server ends the connection; what it says before is thrown away."""
    made.settimeout(within_s)
    try:
        while made.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
