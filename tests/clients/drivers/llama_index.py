"""Driver of LlamaIndex's OpenAILike."""

from __future__ import annotations

from typing import Any

import client_paths as paths
import openai
from client_paths import Server
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from typed_answer import WEATHER_QUESTION, Capital, get_weather


def connect(server: Server, **rest: Any) -> OpenAILike:
    rest = {
        "max_tokens": 150,
        "temperature": 0.0,
        "is_function_calling_model": True,
        "is_chat_model": True,
    } | rest
    return OpenAILike(
        model=server.model,
        api_base=server.url,
        api_key="any",
        context_window=8192,
        max_retries=0,
        timeout=120,
        **rest,
    )


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def plain(server: Server) -> None:
    answer = connect(server).chat(
        [ChatMessage(role="system", content="You are helpful."), user(paths.QUESTION)]
    )
    paths.check("Paris" in answer.message.content, answer)
    completed = connect(server, is_chat_model=False).complete("The capital of France is")
    paths.check("Paris" in completed.text, completed)


def streamed(server: Server) -> None:
    pieces = list(connect(server).stream_chat([user(paths.QUESTION)]))
    paths.check("Paris" in pieces[-1].message.content and len(pieces) > 1, pieces)


def structured(server: Server) -> None:
    llm = connect(server, should_use_structured_outputs=True).as_structured_llm(Capital)
    answer = llm.chat([user(paths.QUESTION)])
    paths.check(isinstance(answer.raw, Capital), answer)


def tools(server: Server) -> None:
    """A forced call, its result in the history, and typed output by a call."""
    llm, tool = connect(server), FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([tool], user_msg=WEATHER_QUESTION, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    paths.check(calls[0].tool_name == "get_weather", answer)
    results = [
        ChatMessage(role="tool", content="18 degrees, sun", additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    llm.chat_with_tools([tool], chat_history=[user(WEATHER_QUESTION), answer.message, *results])
    *_, last = llm.stream_chat_with_tools([tool], user_msg=WEATHER_QUESTION, tool_required=True)
    paths.check(llm.get_tool_calls_from_response(last), last)
    typed = llm.as_structured_llm(Capital).chat([user(paths.QUESTION)])
    paths.check(isinstance(typed.raw, Capital), typed)


def second_turn(server: Server) -> None:
    first = connect(server).chat([user(paths.QUESTION)])
    answer = connect(server).chat([user(paths.QUESTION), first.message, user(paths.FOLLOW_UP)])
    paths.check(answer.message.content, answer)


def overflow(server: Server) -> str:
    return paths.expect_overflow(
        lambda: connect(server).chat([user(paths.LONG_PROMPT)]), openai.BadRequestError
    )


def cancel(server: Server) -> None:
    stream = connect(server, max_tokens=paths.ENDLESS_TOKENS).stream_chat([user(paths.STORY)])
    for _ in range(3):
        next(stream)
    stream.close()
    paths.expect_idle(server)


if __name__ == "__main__":
    paths.report(
        {
            "plain": plain,
            "streamed": streamed,
            "structured": structured,
            "tools": tools,
            "second turn": second_turn,
            "overflow": overflow,
            "cancel": cancel,
        }
    )
