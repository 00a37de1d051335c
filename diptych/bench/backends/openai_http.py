"""Backend of servers with OpenAI's HTTP API: `/v1/completions` or `/v1/chat/completions`, streamed.

The HTTP client is aiohttp, the one that vLLM's and SGLang's own generators use: its parser is C, and a
generator that shares cores with the server must be light. Completions take token ids, so that prompts
have exactly the wanted length; a chat takes text, see `as_text`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any, Literal

import aiohttp

from diptych.bench.backends import Unreachable
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.backends.server_sent_events import EventReader
from diptych.bench.datasets.token_source import as_text
from diptych.bench.request import BenchRequest, Reply, RequestFailed

Endpoint = Literal["completions", "chat/completions"]

# Where a message has its text. Thoughts are tokens, too: `reasoning` is vLLM's and Ollama's name for them,
# the last one DeepSeek's and SGLang's.
_TEXTS = ("text", "content", "reasoning", "reasoning_content")

# Less than the 5 s after which common servers close an idle connection: none is used that may be closing.
_KEEPALIVE_S = 2.0
_LISTING = aiohttp.ClientTimeout(total=10)  # what the gRPC backends wait for their list, too


class OpenAIBackend:
    """A server at `base_url`, with or without the final `/v1`.

    `tls` None trusts the public roots. `new_connections`: one for each request. llama.cpp's server promises
    to keep a connection alive and closes it at the end of a stream, so that every second request on a kept
    one fails.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: Endpoint,
        asking: Asking,
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        new_connections: bool = False,
    ) -> None:
        self.name = "openai-chat" if endpoint == "chat/completions" else "openai"
        self._root = base_url.rstrip("/").removesuffix("/v1") + "/v1"
        self._endpoint, self._asking = endpoint, asking
        self._model = asking.model
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=tls or True,
                limit=0,
                force_close=new_connections,
                keepalive_timeout=None if new_connections else _KEEPALIVE_S,
            ),
            timeout=aiohttp.ClientTimeout(total=asking.timeout_s),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            read_bufsize=1 << 18,
        )

    async def model(self) -> str:
        if self._model is None:
            try:
                async with self._session.get(f"{self._root}/models", timeout=_LISTING) as response:
                    response.raise_for_status()
                    listed = await response.json(content_type=None)
                self._model = str(listed["data"][0]["id"])
            except TimeoutError:
                raise Unreachable(f"{self._root}/models: no answer in {_LISTING.total:g} s") from None
            except aiohttp.ClientError as error:
                raise Unreachable(f"{self._root}/models: {_told(error)}") from None
            except (KeyError, IndexError, TypeError, ValueError):
                raise Unreachable(f"{self._root}/models names no model; give --model") from None
        return self._model

    async def send(self, request: BenchRequest) -> Reply:
        answer = _Answer(self._endpoint, self._asking.on_output)
        body = json.dumps(self._body(request, await self.model()))
        try:
            async with self._session.post(
                f"{self._root}/{self._endpoint}", data=body, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    page = await response.read()  # a proxy's, in any charset
                    raise RequestFailed(f"HTTP {response.status}", page.decode(errors="replace")[:300])
                async for piece in response.content.iter_any():
                    answer.feed(piece, time.perf_counter())
        except TimeoutError:  # a ServerTimeoutError of aiohttp is one too
            raise RequestFailed("TIMEOUT", f"no whole answer in {self._asking.timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise RequestFailed("CONNECTION", _told(error)) from None
        return answer.reply(request)

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)  # the transports close in the loop's next turn

    def _body(self, request: BenchRequest, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": request.output_len,
            "temperature": self._asking.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._asking.ignore_eos:
            body["ignore_eos"] = True  # an extension, but of vLLM, SGLang and llama.cpp alike
        prompt = request.prompt
        if self._endpoint == "completions":
            body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        else:
            text = prompt if isinstance(prompt, str) else as_text(prompt)
            body["messages"] = [{"role": "user", "content": text}]
        body.update(self._asking.extra_body)
        return {key: value for key, value in body.items() if value is not None}


class _Answer:
    """Answer that a stream brings, piece by piece."""

    def __init__(self, endpoint: Endpoint, on_output: Callable[[float], None] | None) -> None:
        self._chat = endpoint == "chat/completions"
        self._on_output = on_output
        self._reader = EventReader()
        self._arrivals: list[float] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._finished = False
        self._ended: float | None = None

    def feed(self, piece: bytes, now: float) -> None:
        """Add a message. Raises RequestFailed for an error that the server sends in its stream."""
        for data in self._reader.feed(piece):
            if data == b"[DONE]":
                self._finished = True
                continue
            event = _parsed(data)
            if event.get("error"):
                raise RequestFailed("STREAM_ERROR", json.dumps(event["error"])[:300])
            self._usage = event.get("usage") or self._usage
            for choice in (event.get("choices") or ())[:1]:
                self._choice(choice, now)

    def reply(self, request: BenchRequest) -> Reply:
        """Return the reply. Raises RequestFailed for a stream without output or without an end."""
        if not self._arrivals and self._ended is not None and self._usage.get("completion_tokens"):
            # Tokens were made, and their bytes are no whole character: they came with the end.
            self._arrivals.append(self._ended)
        if not self._arrivals:
            raise RequestFailed("NO_OUTPUT", "the stream ended without a token")
        if not self._finished:
            raise RequestFailed("BROKEN_STREAM", "the stream ended before its answer did")
        details = self._usage.get("prompt_tokens_details") or {}
        return Reply(
            arrivals=tuple(self._arrivals),
            prompt_tokens=self._usage.get("prompt_tokens") or request.prompt_len or 0,
            output_tokens=self._usage.get("completion_tokens") or len(self._arrivals),
            cached_tokens=details.get("cached_tokens") or 0,
            text="".join(self._texts),
        )

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        said = choice.get("delta") or {} if self._chat else choice
        text = next((said[name] for name in _TEXTS if said.get(name)), "")
        ended = choice.get("finish_reason") is not None
        # Half a character is a token without text. The opening message of a chat, which only says whose
        # turn it is, a closing one that only says why it ended, and one after it, with the counts, are none.
        if text or not (ended or self._ended is not None or "role" in said):
            self._arrivals.append(now)
            self._texts.append(text)
            if self._on_output is not None:
                self._on_output(now)
        if ended:
            self._finished, self._ended = True, now


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise RequestFailed("BAD_STREAM", f"no JSON object: {data[:100]!r}")
    return event


def _told(error: BaseException) -> str:
    if "Bad status line" in str(error):
        return "what answers there speaks no HTTP/1.1; is it a gRPC port, for --address?"
    return str(error) or type(error).__name__
