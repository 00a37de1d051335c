"""HTTP client of probes: just enough for /ready, /health and /metrics, with nothing to install."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable

_TIMEOUT_S = 2.0


async def http_status(
    host: str, port: int, path: str, *, tls: bool = False, timeout_s: float = _TIMEOUT_S
) -> int | None:
    """Return the status code of `GET path`, or None when no answer has one within `timeout_s`.

    With `tls` any certificate will do: the process is our own, on this machine, and gets no secret.
    """
    answer = await _ask(host, port, path, tls, timeout_s, asyncio.StreamReader.readline)
    words = (answer or b"").split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


async def http_body(
    host: str, port: int, path: str, *, tls: bool = False, timeout_s: float = _TIMEOUT_S
) -> bytes | None:
    """Return the body of `GET path`, or None when there is none within `timeout_s`, or an error."""
    answer = await _ask(host, port, path, tls, timeout_s, asyncio.StreamReader.read)
    head, _, body = (answer or b"").partition(b"\r\n\r\n")
    return body if b" 200 " in head.partition(b"\r\n")[0] else None


async def _ask(
    host: str,
    port: int,
    path: str,
    tls: bool,
    timeout_s: float,
    read: Callable[[asyncio.StreamReader], Awaitable[bytes]],
) -> bytes | None:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), port, ssl=_trusting() if tls else None
            )
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                return await read(reader)
            finally:
                writer.close()
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        return None


def reachable(host: str) -> str:
    """Return an address to reach a server that listens on every one."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
