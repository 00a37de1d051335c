"""Driver of smolagents' OpenAIModel and of its agents."""

from __future__ import annotations

from typing import Any

import client_paths as paths
import openai
from client_paths import Server
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole
from typed_answer import WEATHER_QUESTION, Capital


@tool
def get_weather(city: str) -> str:
    """Return the current weather of a city.

    Args:
        city: the city's name
    """
    return f"18 degrees and sun in {city}"


def connect(server: Server, **rest: Any) -> OpenAIModel:
    rest = {"max_tokens": 150, "temperature": 0.0} | rest
    return OpenAIModel(
        server.model,
        api_base=server.url,
        api_key="any",
        client_kwargs={"max_retries": 0, "timeout": 120},
        **rest,
    )


def user(content: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": content}])


def plain(server: Server) -> None:
    """An answer, and a code agent, whose turns are plain text with stop strings."""
    answer = connect(server).generate([user(paths.QUESTION)])
    paths.check("Paris" in answer.content, answer)
    steps = list(CodeAgent(tools=[], model=connect(server)).run("What is 2 + 2?", stream=True, max_steps=1))
    paths.expect_no_refusal(steps)


def streamed(server: Server) -> None:
    pieces = list(connect(server).generate_stream([user(paths.QUESTION)]))
    paths.check("Paris" in "".join(piece.content or "" for piece in pieces) and len(pieces) > 1, pieces)


def structured(server: Server) -> None:
    schema = {"name": "capital", "schema": Capital.model_json_schema()}
    answer = connect(server).generate(
        [user(paths.QUESTION)], response_format={"type": "json_schema", "json_schema": schema}
    )
    Capital.model_validate_json(answer.content)


def tools(server: Server) -> None:
    """An agent that must call one of its tools in each of two steps."""
    agent = ToolCallingAgent(tools=[get_weather], model=connect(server, max_tokens=300))
    steps = list(agent.run(WEATHER_QUESTION, stream=True, max_steps=2))
    paths.expect_no_refusal(steps)
    called = [step for step in steps if getattr(step, "tool_calls", None)]
    paths.check(called, steps)


def second_turn(server: Server) -> None:
    first = connect(server).generate([user(paths.QUESTION)])
    answer = connect(server).generate([user(paths.QUESTION), first, user(paths.FOLLOW_UP)])
    paths.check(answer.content, answer)


def overflow(server: Server) -> str:
    return paths.expect_overflow(
        lambda: connect(server).generate([user(paths.LONG_PROMPT)]), openai.BadRequestError
    )


def cancel(server: Server) -> None:
    stream = connect(server, max_tokens=paths.ENDLESS_TOKENS).generate_stream([user(paths.STORY)])
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
