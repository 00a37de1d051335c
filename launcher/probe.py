"""Asks an HTTP port for its status: just enough for /ready and /health, with nothing to install."""

import asyncio
import ssl

_TIMEOUT_S = 2.0


async def http_status(
    host: str, port: int, path: str, *, tls: bool = False, timeout_s: float = _TIMEOUT_S
) -> int | None:
    """Status code of `GET path`, or None when nobody answers with one within `timeout_s`.

    With `tls` any certificate will do: it asks a process of our own on this machine, and tells it nothing.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), port, ssl=_trusting() if tls else None
            )
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                words = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        return None
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


def reachable(host: str) -> str:
    """An address to reach a server that listens on every one."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
