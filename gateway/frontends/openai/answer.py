"""Base of both kinds of answers: envelope, numbers of choices, usage, finish reasons, and JSON in pieces.

Choices are numbered over all prompts: choice ``c`` of prompt ``p`` is ``p * n + c``. An event is put together
from strings that are made once for a stream and the JSON of what is new, because this is done for each token.
JSON comes in pieces, since choices share what is large: their prompt and its scores.

Large JSON is put together from text, in turns with other work of the event loop: `json.dumps` of all at once
would keep other requests' tokens for as long as it takes. All of it is ASCII, so that characters are bytes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

from diptych.v1 import inference_pb2 as pb
from gateway.cooperative_yield import PORTION, Yielder, slices
from gateway.frontends.openai.request_builder import HttpGenerateRequest

BLOCK: Final = 64 * 1024  # bytes that go out in one write, as long as pieces are small
_IDS_AS_ITEMS: Final = 16  # a token id is written in 60 ns


def inside(value: object) -> str:
    """Return the JSON of a string, a list or an object, without what encloses it."""
    return json.dumps(value)[1:-1]


def joined(parts: Iterable[str]) -> str:
    """Join the insides of lists to the inside of one list."""
    return ",".join(filter(None, parts))


async def ids_inside(ids: Sequence[int], turns: Yielder) -> str:
    """Return the inside of a list of token ids."""
    parts = []
    for some in slices(ids, PORTION * _IDS_AS_ITEMS):
        parts.append(inside(list(some)))
        await turns.done(len(some) // _IDS_AS_ITEMS)
    return joined(parts)


def blocks(wholes: Iterable[Sequence[str]]) -> Iterator[bytes]:
    """Yield what to write one by one: small texts together, large ones for themselves.

    None of ``wholes``, each of which is given in pieces, is in two of the blocks.
    """
    held: list[str] = []
    size = 0
    for pieces in wholes:
        held += pieces
        size += sum(map(len, pieces))
        if size >= BLOCK:
            yield "".join(held).encode()
            held, size = [], 0
    if held:
        yield "".join(held).encode()


MODEL_DIGEST: Final = "x-model-digest"
DONE: Final = "data: [DONE]\n\n"
# OpenAI has the first two and tool_calls; the others are spelled as in vLLM and SGLang.
_FINISH: Final = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TIME_LIMIT: "time_limit",
    pb.FINISH_REASON_CANCELLED: "abort",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_REPETITION: "repetition",
}


class Answer(ABC):
    """Answer to one HTTP request, as one JSON object or as server-sent events.

    Args:
        model: the served name, which the client may have called otherwise.
        created: Unix time in seconds.
    """

    id_headers: ClassVar[tuple[str, ...]] = ("x-request-id",)
    """Headers of the answer that have the request's id."""

    def __init__(self, asked: HttpGenerateRequest, *, model: str, created: int) -> None:
        self._asked = asked
        self._model = model
        self._created = created
        self._usage = pb.Usage()
        self.digest = ""

    @property
    def version_header(self) -> dict[str, str]:
        """Return the header with the version of the model, where ``digest`` has been set."""
        return {MODEL_DIGEST: self.digest} if self.digest else {}

    @abstractmethod
    def id_of(self, request_id: str) -> str:
        """Return the answer's id."""

    @abstractmethod
    def begin(self, request_id: str) -> None:
        """Name the answer, before its first event."""

    @abstractmethod
    async def events(self, prompt: int, message: pb.GenerateResponse) -> list[list[str]]:
        """Return the events of a message of the ``prompt``-th prompt, each in pieces; may be none."""

    @abstractmethod
    def last_events(self) -> str:
        """Return the events after all messages of all prompts."""

    @abstractmethod
    async def whole(self, request_id: str, messages: Sequence[pb.GenerateResponse]) -> list[str]:
        """Return the one JSON object, in pieces; ``messages`` are whole answers, one for each prompt."""

    def error_event(self, error: dict[str, Any]) -> str:
        """Return the event of an error after others; ``error`` is the object with the member of that name."""
        return f"data: {json.dumps(error)}\n\n"

    def _add(self, more: pb.Usage) -> None:
        self._usage.prompt_tokens += more.prompt_tokens
        self._usage.completion_tokens += 0 if self._asked.prompt_only else more.completion_tokens
        self._usage.cached_prompt_tokens += more.cached_prompt_tokens
        self._usage.reasoning_tokens += more.reasoning_tokens
        self._usage.drafted_tokens += more.drafted_tokens
        self._usage.accepted_draft_tokens += more.accepted_draft_tokens


class ChoicesAnswer(Answer):
    """Answer whose output is a list of choices.

    Args:
        fingerprint: of model and program.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    event_object: ClassVar[str]

    def __init__(self, asked: HttpGenerateRequest, *, model: str, fingerprint: str, created: int) -> None:
        super().__init__(asked, model=model, created=created)
        self._fingerprint = fingerprint
        self._running = pb.Usage()  # so far, of a stream that shows it
        self._head = self._tail = ""
        # The same for all prompts.
        self._stop_token_ids = frozenset(asked.builders[0].request.stopping.stop_token_ids)

    async def events(self, prompt: int, message: pb.GenerateResponse) -> list[list[str]]:
        if message.HasField("usage"):
            self._add(message.usage)
        self._running.prompt_tokens += message.prompt.token_count
        self._running.cached_prompt_tokens += message.prompt.cached_token_count
        turns = Yielder()
        events = []
        if message.HasField("prompt"):
            for choice in await self.opening(prompt, message.prompt, turns):
                events.append([self._head, *choice, self._event_end()])
        for output in message.outputs:
            made = await self.event_choice(self._number(prompt, output.index), output, turns)
            if not self._asked.prompt_only:
                self._running.completion_tokens += len(output.token_ids)
            events.append([self._head, made, self._event_end()])
        return events

    def _event_end(self) -> str:
        """Return the text after the choice of an event."""
        if not self._asked.usage.running:
            return self._tail
        return f'],"usage":{json.dumps(usage(self._running))}}}\n\n'

    def begin(self, request_id: str) -> None:
        opened = json.dumps(self._envelope(self.event_object, request_id))
        self._head = f'data: {opened[:-1]}, "choices":['
        self._tail = '],"usage":null}\n\n' if self._asked.usage.last else "]}\n\n"

    def id_of(self, request_id: str) -> str:
        return f"{self.id_prefix}-{request_id}"

    def last_events(self) -> str:
        if not self._asked.usage.last:
            return DONE
        return f'{self._head}],"usage":{json.dumps(usage(self._usage))}}}\n\n{DONE}'

    async def whole(self, request_id: str, messages: Sequence[pb.GenerateResponse]) -> list[str]:
        turns = Yielder()
        pieces = [f'{{{inside(self._envelope(self.whole_object, request_id))}, "choices": [']
        between = ""
        for prompt, message in enumerate(messages):
            self._add(message.usage)
            for output in sorted(message.outputs, key=lambda output: output.index):
                number = self._number(prompt, output.index)
                pieces.append(between)
                pieces += await self.whole_choice(number, prompt, message.prompt, output, turns)
                between = ", "
        pieces.append(f'], "usage": {json.dumps(usage(self._usage))}}}')
        return pieces

    @abstractmethod
    async def opening(self, prompt: int, info: pb.PromptInfo, turns: Yielder) -> list[list[str]]:
        """Return the JSON ahead of a prompt's first output, by choice and in pieces."""

    @abstractmethod
    async def event_choice(self, number: int, output: pb.OutputDelta, turns: Yielder) -> str:
        """Return the JSON of one choice in an event: its new output."""

    @abstractmethod
    async def whole_choice(
        self, number: int, prompt: int, info: pb.PromptInfo, output: pb.OutputDelta, turns: Yielder
    ) -> list[str]:
        """Return the JSON of one choice of a whole answer, in pieces."""

    def _ending(self, output: pb.OutputDelta) -> dict[str, Any]:
        """Return why a choice ended. ``stop_reason`` is vLLM's: the client's string or token id.

        An end of sequence that the client did not name is the model's own end, and null.
        """
        reason: str | int | None = output.stop_text or None
        if output.HasField("stop_token_id") and output.stop_token_id in self._stop_token_ids:
            reason = output.stop_token_id
        return {"finish_reason": _FINISH[output.finish_reason], "stop_reason": reason}

    def _event_ending(self, output: pb.OutputDelta) -> str:
        """Return `_ending` as members of an event; nearly every event ends nothing."""
        return inside(self._ending(output)) if output.finish_reason else '"finish_reason":null'

    def _number(self, prompt: int, index: int) -> int:
        return prompt * self._asked.choices + index

    def _envelope(self, kind: str, request_id: str) -> dict[str, Any]:
        return {
            "id": self.id_of(request_id),
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }


def usage(total: pb.Usage) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": total.cached_prompt_tokens},
    }
    details = {"reasoning_tokens": total.reasoning_tokens} if total.reasoning_tokens else {}
    if (
        total.drafted_tokens
    ):  # not OpenAI's accepted_prediction_tokens, which are of texts that clients predict
        details["drafted_tokens"] = total.drafted_tokens
        details["accepted_draft_tokens"] = total.accepted_draft_tokens
    if details:
        counts["completion_tokens_details"] = details
    return counts
