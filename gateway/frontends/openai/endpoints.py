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
from gateway.model.served_model import ServedModel
from gateway.output.detokenizer import text_after

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
GENERATING: Final = (COMPLETIONS, CHATS, RESPONSES, MESSAGES)

Read = Callable[[dict[str, object]], tuple[HttpGenerateRequest, Answer]]
"""Reads the body of a kind of generation, and makes the answer to it."""


class Endpoints:
    """Readers of bodies for one model.

    Args:
        digest: of the model, for ``system_fingerprint``.
    """

    def __init__(self, model: ServedModel, digest: str) -> None:
        self._model = model
        self._fingerprint = f"fp_{digest[:12]}"
        self.by_path: Mapping[str, Read] = {
            COMPLETIONS: self._completions,
            CHATS: self._chat,
            RESPONSES: self._responses,
            MESSAGES: self._messages,
        }

    def _completions(self, members: dict[str, object]) -> tuple[HttpGenerateRequest, Answer]:
        asked = read_completions(members)
        return asked, CompletionsAnswer(
            asked,
            model=self._shown_name(asked),
            fingerprint=self._fingerprint,
            created=int(time.time()),
            decode=lambda ids: self._model.tokenizer.decode(ids, False),
            text_after=partial(text_after, self._model.tokenizer, prompt_shown=asked.echo),
            special=self._model.tokenizer.is_special,
        )

    def _chat(self, members: dict[str, object]) -> tuple[HttpGenerateRequest, Answer]:
        asked = read_chat(members)
        return asked, ChatAnswer(
            asked,
            model=self._shown_name(asked),
            fingerprint=self._fingerprint,
            created=int(time.time()),
        )

    def _responses(self, members: dict[str, object]) -> tuple[HttpGenerateRequest, Answer]:
        asked, body = read_responses(members)
        return asked, ResponsesAnswer(asked, body, model=self._shown_name(asked), created=int(time.time()))

    def _messages(self, members: dict[str, object]) -> tuple[HttpGenerateRequest, Answer]:
        asked = read_messages(members)
        return asked, MessagesAnswer(asked, model=self._shown_name(asked), created=int(time.time()))

    def _shown_name(self, asked: HttpGenerateRequest) -> str:
        """Return the name in the answer: an adapter's as it was asked for; any other is refused later."""
        name, card = asked.builders[0].request.model, self._model.card
        return card.shown_name(name) if card.answers_to(name) else name
