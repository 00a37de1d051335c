"""Driver of LangChain's ChatOpenAI."""

from __future__ import annotations

from typing import Any

import client_paths as paths
from client_paths import Server
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from typed_answer import WEATHER_QUESTION, Capital, get_weather


@tool
def get_time(zone: str) -> str:
    """Return the time in a zone."""
    return f"noon in {zone}"


def model(server: Server, **rest: Any) -> ChatOpenAI:
    rest = {"max_tokens": paths.MAX_TOKENS, "temperature": 0} | rest
    return ChatOpenAI(
        base_url=server.url,
        api_key="any",
        model=server.model,
        max_retries=0,
        timeout=120,
        stream_usage=True,
        **rest,
    )


def plain(server: Server) -> None:
    answer = model(server).invoke([SystemMessage("You are helpful."), HumanMessage(paths.QUESTION)])
    paths.check("Paris" in answer.content, answer)
    paths.check(answer.usage_metadata["output_tokens"] > 0, answer)


def streamed(server: Server) -> None:
    whole: Any = None
    for chunk in model(server).stream(paths.QUESTION):
        whole = chunk if whole is None else whole + chunk
    paths.check("Paris" in whole.content, whole)
    paths.check(whole.usage_metadata["output_tokens"] > 0, whole)


def structured(server: Server) -> None:
    """Typed output by each of the client's three methods that the model's template allows."""
    for method in ("json_schema", "json_mode"):
        chain = model(server, max_tokens=100).with_structured_output(Capital, method=method, include_raw=True)
        answer = chain.invoke(paths.QUESTION + " Answer in JSON.")
        if method == "json_schema":
            paths.check(isinstance(answer["parsed"], Capital), answer)


def tools(server: Server) -> None:
    """Two tools of which one is forced, typed output by a call, and the result in the history."""
    offered = [tool(get_weather), get_time]
    history: list = [HumanMessage(WEATHER_QUESTION)]
    forced = model(server, max_tokens=300).bind_tools(offered, tool_choice="any")
    answer: AIMessage = forced.invoke(history)
    paths.check(answer.tool_calls, answer)
    whole: Any = None
    for chunk in forced.stream(history):
        whole = chunk if whole is None else whole + chunk
    paths.check(whole.tool_calls, whole)
    history += [
        answer,
        *(ToolMessage("18 degrees, sun", tool_call_id=call["id"]) for call in answer.tool_calls),
    ]
    model(server).bind_tools(offered).invoke(history)
    typed = model(server, max_tokens=200).with_structured_output(Capital, method="function_calling")
    paths.check(isinstance(typed.invoke(paths.QUESTION), Capital), "no typed output by a call")


def second_turn(server: Server) -> None:
    first = model(server).invoke([HumanMessage(paths.QUESTION)])
    answer = model(server).invoke([HumanMessage(paths.QUESTION), first, HumanMessage(paths.FOLLOW_UP)])
    paths.check(answer.content, answer)


def overflow(server: Server) -> str:
    return paths.expect_overflow(lambda: model(server).invoke(paths.LONG_PROMPT), ContextOverflowError)


def cancel(server: Server) -> None:
    stream = model(server, max_tokens=paths.ENDLESS_TOKENS).stream(paths.STORY)
    for _ in range(3):
        next(stream)
    stream.close()
    paths.expect_idle(server)


def images(server: Server) -> None:
    """Ask about two images in both forms that messages have for them, whole and streamed."""
    answers: dict[int, list[tuple[str, int]]] = {}
    for seed in (1, 2):
        for block in (
            {"type": "image_url", "image_url": {"url": paths.png_url(seed)}},
            {"type": "image", "base64": paths.png_base64(seed), "mime_type": "image/png"},
        ):
            asked = [HumanMessage([block, {"type": "text", "text": paths.IMAGE_QUESTION}])]
            streamed: Any = None
            for chunk in model(server).stream(asked):
                streamed = chunk if streamed is None else streamed + chunk
            answers.setdefault(seed, []).extend(
                (one.content, one.usage_metadata["input_tokens"])
                for one in (model(server).invoke(asked), streamed)
            )
    paths.check_images(answers)


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
            "images": images,
        }
    )
