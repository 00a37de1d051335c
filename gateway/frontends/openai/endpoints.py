"""Endpoints that generate, by path: what reads a body of each, and makes the answer to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from gateway.frontends.anthropic.messages_answer import MessagesAnswer
from gateway.frontends.anthropic.messages_request import read_messages
from gateway.frontends.openai.answer import Answer
from gateway.frontends.openai.chat_answer import ChatAnswer
from gateway.frontends.openai.chat_request import read_chat
from gateway.frontends.openai.completions_answer import CompletionsAnswer
from gateway.frontends.openai.completions_request import read_completions
from gateway.frontends.openai.request_builder import HttpGenerateRequest
from gateway.frontends.openai.responses_answer import ResponsesAnswer
from gateway.frontends.openai.responses_request import read_responses
from gateway.output.detokenizer import text_after
from gateway.served_models.core import ModelCore
from gateway.served_models.router import ModelRouter

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
GENERATING: Final = (COMPLETIONS, CHATS, RESPONSES, MESSAGES)

Read = Callable[[dict[str, object]], tuple[HttpGenerateRequest, Answer]]
"""Reads the body of a kind of generation, and makes the answer to it."""

_Asked = tuple[HttpGenerateRequest, Callable[[ModelCore], Answer]]
_ReadFor = Callable[[dict[str, object]], _Asked]


class Endpoints:
    """Readers of bodies. A body is read for the model that it names, by alias too."""

    def __init__(self, router: ModelRouter) -> None:
        self._router = router
        self.by_path: Mapping[str, Read] = {
            COMPLETIONS: partial(self._read, self._completions),
            CHATS: partial(self._read, self._chat),
            RESPONSES: partial(self._read, self._responses),
            MESSAGES: partial(self._read, self._messages),
        }

    def _read(self, read: _ReadFor, members: dict[str, object]) -> tuple[HttpGenerateRequest, Answer]:
        """Read a body for its model, whose version the answer has."""
        asked, answer_of = read(members)
        core = self._router.assign([builder.request for builder in asked.builders])
        answer = answer_of(core)
        answer.digest = core.digest
        return asked, answer

    def _completions(self, members: dict[str, object]) -> _Asked:
        asked = read_completions(members)

        def answer(core: ModelCore) -> Answer:
            tokenizer = core.model.tokenizer
            return CompletionsAnswer(
                asked,
                model=_shown_name(asked, core),
                fingerprint=_fingerprint(core),
                created=int(time.time()),
                decode=lambda ids: tokenizer.decode(ids, False),
                text_after=partial(text_after, tokenizer, prompt_shown=asked.echo),
                special=tokenizer.is_special,
            )

        return asked, answer

    def _chat(self, members: dict[str, object]) -> _Asked:
        asked = read_chat(members)

        def answer(core: ModelCore) -> Answer:
            name, created = _shown_name(asked, core), int(time.time())
            return ChatAnswer(asked, model=name, fingerprint=_fingerprint(core), created=created)

        return asked, answer

    def _responses(self, members: dict[str, object]) -> _Asked:
        asked, body = read_responses(members)

        def answer(core: ModelCore) -> Answer:
            return ResponsesAnswer(asked, body, model=_shown_name(asked, core), created=int(time.time()))

        return asked, answer

    def _messages(self, members: dict[str, object]) -> _Asked:
        asked = read_messages(members)

        def answer(core: ModelCore) -> Answer:
            return MessagesAnswer(asked, model=_shown_name(asked, core), created=int(time.time()))

        return asked, answer


def _shown_name(asked: HttpGenerateRequest, core: ModelCore) -> str:
    """Return the name in the answer: an adapter's as it was asked for; any other is refused later."""
    name, card = asked.builders[0].request.model, core.model.card
    return card.shown_name(name) if card.answers_to(name) else name


def _fingerprint(core: ModelCore) -> str:
    return f"fp_{core.digest[:12]}"
