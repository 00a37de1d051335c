"""Driver of dspy: predictors over its chat, JSON and native-tool adapters."""

from __future__ import annotations

import asyncio
from typing import Any

import client_paths as paths
import dspy
from client_paths import Server
from typed_answer import WEATHER_QUESTION, Capital, get_weather


class Structured(dspy.Signature):
    """Name the country and its capital."""

    question: str = dspy.InputField()
    answer: Capital = dspy.OutputField()


class LM(dspy.LM):
    """A language model that the client does not know, with what its server can do stated."""

    supports_function_calling = True
    supports_response_schema = True
    supported_params = frozenset({"response_format", "tools", "tool_choice"})


def connect(server: Server, **rest: Any) -> dspy.LM:
    rest = {"max_tokens": 150, "temperature": 0.0} | rest
    return LM(
        f"openai/{server.model}",
        api_base=server.url,
        api_key="any",
        cache=False,
        num_retries=0,
        timeout=120,
        **rest,
    )


def plain(server: Server) -> None:
    answer = connect(server)(paths.QUESTION)
    paths.check("Paris" in str(answer), answer)
    with dspy.context(lm=connect(server), adapter=dspy.ChatAdapter()):
        try:
            dspy.Predict("question -> answer")(question=paths.QUESTION)
        except dspy.AdapterParseError:  # the model does not keep to the form that the prompt asks for
            return


def streamed(server: Server) -> None:
    async def read() -> int:
        program = dspy.streamify(dspy.Predict("question -> answer"), async_streaming=True)
        pieces = 0
        try:
            async for _ in program(question=paths.QUESTION):
                pieces += 1
        except dspy.AdapterParseError:
            pass
        return pieces

    with dspy.context(lm=connect(server), adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        pieces = asyncio.run(read())
    paths.check(pieces > 1, f"{pieces} pieces")


def structured(server: Server) -> None:
    with dspy.context(lm=connect(server), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Structured)(question=paths.QUESTION)
    paths.check(isinstance(answer.answer, Capital), answer)


def tools(server: Server) -> None:
    """Tools by the client's own prompt, and natively."""
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=connect(server, max_tokens=200), adapter=adapter):
        signature = dspy.Signature("question: str, tools: list[dspy.Tool] -> outputs: dspy.ToolCalls")
        try:
            dspy.Predict(signature)(question=WEATHER_QUESTION, tools=[dspy.Tool(get_weather)])
        except dspy.AdapterParseError:  # the choice is the model's
            return


def second_turn(server: Server) -> None:
    history = dspy.History(messages=[{"question": paths.QUESTION, "answer": "Paris"}])
    with dspy.context(lm=connect(server)):
        try:
            dspy.Predict("question, history: dspy.History -> answer")(
                question=paths.FOLLOW_UP, history=history
            )
        except dspy.AdapterParseError:
            return


def overflow(server: Server) -> str:
    return paths.expect_overflow(lambda: connect(server)(paths.LONG_PROMPT), dspy.ContextWindowExceededError)


def cancel(server: Server) -> None:
    async def begin() -> None:
        task = asyncio.create_task(connect(server, max_tokens=paths.ENDLESS_TOKENS).acall(paths.STORY))
        await asyncio.sleep(2)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(begin())
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
