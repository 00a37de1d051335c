"""Asks an HTTP port for its status: just enough for /ready, with nothing to install."""

import asyncio

_TIMEOUT_S = 2.0


async def http_status(host: str, port: int, path: str) -> int | None:
    """Status code of `GET path`, or None when nobody answers with one within two seconds."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                words = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
