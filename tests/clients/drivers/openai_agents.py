"""Driver of openai-agents over chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import client_paths as paths
import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from client_paths import Server
from typed_answer import WEATHER_QUESTION, Capital, get_weather

agents.set_tracing_disabled(True)


def agent(
    server: Server, *, max_tokens: int = 150, settings: dict[str, Any] | None = None, **rest: Any
) -> Agent:
    client = openai.AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=120)
    model = OpenAIChatCompletionsModel(server.model, client)
    knobs = ModelSettings(temperature=0.0, max_tokens=max_tokens, **(settings or {}))
    return Agent(name="guide", instructions="You are helpful.", model=model, model_settings=knobs, **rest)


def plain(server: Server) -> None:
    answer = asyncio.run(Runner.run(agent(server), paths.QUESTION))
    paths.check("Paris" in answer.final_output, answer)


def streamed(server: Server) -> None:
    async def read() -> tuple[int, str]:
        result = Runner.run_streamed(agent(server), paths.QUESTION)
        pieces = [event async for event in result.stream_events() if event.type == "raw_response_event"]
        return len(pieces), result.final_output

    pieces, text = asyncio.run(read())
    paths.check("Paris" in text and pieces > 1, text)


def structured(server: Server) -> None:
    answer = asyncio.run(Runner.run(agent(server, output_type=Capital), paths.QUESTION))
    paths.check(isinstance(answer.final_output, Capital), answer)


async def loop_of(asked: Agent, *, streamed: bool) -> list[Any]:
    """The items of an agent's loop. A small model may call its tool in every turn: that is its choice."""
    try:
        if not streamed:
            return (await Runner.run(asked, WEATHER_QUESTION, max_turns=3)).new_items
        result = Runner.run_streamed(asked, WEATHER_QUESTION, max_turns=3)
        async for _ in result.stream_events():
            pass
        return result.new_items
    except agents.MaxTurnsExceeded as ended:
        return ended.run_data.new_items if ended.run_data else []


def tools(server: Server) -> None:
    """A forced call whose result goes back to the model, whole and streamed, and a further turn."""
    asked = agent(server, settings={"tool_choice": "required"}, tools=[function_tool(get_weather)])

    async def ask() -> None:
        for streamed in (False, True):
            items = await loop_of(asked, streamed=streamed)
            paths.check(any(item.type == "tool_call_output_item" for item in items), items)
        question = {"role": "user", "content": WEATHER_QUESTION}
        turns = [question, *(item.to_input_item() for item in items)]
        turns.append({"role": "user", "content": paths.FOLLOW_UP})
        paths.check((await Runner.run(agent(server), turns)).final_output, turns)

    asyncio.run(ask())


def second_turn(server: Server) -> None:
    async def ask() -> None:
        first = await Runner.run(agent(server), paths.QUESTION)
        turns = [*first.to_input_list(), {"role": "user", "content": paths.FOLLOW_UP}]
        paths.check((await Runner.run(agent(server), turns)).final_output, turns)

    asyncio.run(ask())


def overflow(server: Server) -> str:
    return paths.expect_overflow(
        lambda: asyncio.run(Runner.run(agent(server), paths.LONG_PROMPT)), openai.BadRequestError
    )


def cancel(server: Server) -> None:
    async def begin() -> None:
        result = Runner.run_streamed(agent(server, max_tokens=paths.ENDLESS_TOKENS), paths.STORY)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                result.cancel()

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
