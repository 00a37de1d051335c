"""A small HTTP server on asyncio alone that streams server-sent events, cut where no parser expects it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


@dataclass
class ScriptedHttp:
    """OpenAI's two endpoints with scripted timing, in the manner of vLLM (`usage` in a last event).

    `status` other than 200 refuses; `usage` False sends no counts; `vanish_after` closes the connection
    after so many tokens, `fail_after` sends an error event instead, `garbage_after` what is no event of a
    completion; `text` False sends no text before the end, as servers do while a character is incomplete.
    `hangs_up` closes the connection after each stream without having said so. `page` is what it refuses with.
    `events` are sent in place of an answer, `itl` before each. `mute` says nothing at all.
    """

    ttft: float = 0.0
    itl: float = 0.0
    status: int = 200
    usage: bool = True
    vanish_after: int | None = None
    fail_after: int | None = None
    garbage_after: int | None = None
    text: bool = True
    hangs_up: bool = False
    mute: bool = False
    page: bytes = b'{"error": {"message": "come back later"}}'
    events: Sequence[dict[str, Any]] = ()
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def handle(self, reader: Reader, writer: Writer) -> None:
        try:
            while head := await self._head(reader):
                path, length = head
                body = json.loads(await reader.readexactly(length)) if length else {}
                if not await self._answer(path, body, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left, which is its right
        finally:
            writer.close()

    async def _head(self, reader: Reader) -> tuple[str, int] | None:
        request = (await reader.readline()).decode().split()
        length = 0
        while (line := (await reader.readline()).decode().strip().lower()) != "":
            if line.startswith("content-length:"):
                length = int(line.split(":")[1])
        return (request[1], length) if request else None

    async def _answer(self, path: str, body: dict[str, Any], writer: Writer) -> bool:
        self.seen.append((path, body))
        if self.mute:
            await asyncio.Event().wait()
        if path == "/health":
            return _whole(writer, 200, b"{}")
        if path == "/v1/models":
            return _whole(writer, 200, b'{"data": [{"id": "scripted"}]}')
        if self.status != 200:
            return _whole(writer, self.status, self.page)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if not self.events:
            return await self._stream(path.endswith("chat/completions"), body, writer)
        for event in self.events:
            await asyncio.sleep(self.itl)
            await _event(writer, event)
        writer.write(b"0\r\n\r\n")
        return True

    async def _stream(self, chat: bool, body: dict[str, Any], writer: Writer) -> bool:
        if chat:
            await _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.ttft)
        for number in range(body["max_tokens"]):
            if number == self.vanish_after:
                return False
            if number == self.fail_after:
                await _event(writer, {"error": {"message": "out of memory"}})
                break
            if number == self.garbage_after:
                await _piece(writer, b"data: [1, 2]\n\n")
            if number:
                await asyncio.sleep(self.itl)
            if not self.text:
                continue
            said = {"delta": {"content": " ä"}} if chat else {"text": " ä"}
            await _event(writer, {"choices": [{**said, "finish_reason": None}]})
        ending: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        await _event(writer, {"choices": [{**ending, "finish_reason": "length"}]})
        if self.usage:
            counts = {"prompt_tokens": 11, "completion_tokens": body["max_tokens"]}
            counts["prompt_tokens_details"] = {"cached_tokens": 2}
            await _event(writer, {"choices": [], "usage": counts})
        await _piece(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not self.hangs_up


@asynccontextmanager
async def serving(script: ScriptedHttp, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Its base URL, on a free port of the loopback."""
    server = await asyncio.start_server(script.handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _event(writer: Writer, event: dict[str, Any]) -> None:
    await _piece(writer, b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")


async def _piece(writer: Writer, data: bytes) -> None:
    """In two chunks of HTTP, cut in the middle."""
    for part in (data[: len(data) // 2], data[len(data) // 2 :]):
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await writer.drain()


def _whole(writer: Writer, status: int, data: bytes) -> bool:
    writer.write(f"HTTP/1.1 {status} Scripted\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return True
