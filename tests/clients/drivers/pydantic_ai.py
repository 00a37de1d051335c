"""Driver of pydantic-ai's OpenAIChatModel."""

from __future__ import annotations

import asyncio

import client_paths as paths
from client_paths import Server
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from typed_answer import WEATHER_QUESTION, Capital, get_weather


def agent(server: Server, *, max_tokens: int = 150, **rest: object) -> Agent:
    client = AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=120)
    model = OpenAIChatModel(server.model, provider=OpenAIProvider(openai_client=client))
    return Agent(model, model_settings={"max_tokens": max_tokens, "temperature": 0.0}, **rest)


def plain(server: Server) -> None:
    answer = asyncio.run(agent(server, instructions="You are helpful.").run(paths.QUESTION))
    paths.check("Paris" in answer.output, answer)


def streamed(server: Server) -> None:
    async def read() -> list[str]:
        async with agent(server).run_stream(paths.QUESTION) as stream:
            return [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(read())
    paths.check("Paris" in "".join(pieces) and len(pieces) > 1, pieces)


def structured(server: Server) -> None:
    """Typed output by a schema in `response_format`, and by a prompt."""
    for output in (NativeOutput(Capital), NativeOutput(Capital, strict=True), PromptedOutput(Capital)):
        try:
            answer = asyncio.run(agent(server, output_type=output).run(paths.QUESTION))
            paths.check(isinstance(answer.output, Capital), answer)
        except Exception as error:
            if isinstance(output, NativeOutput) or paths.is_refusal(error):
                raise


def tools(server: Server) -> None:
    """Typed output by a forced call, and an agent's own tool with the choice left to the model."""
    answer = asyncio.run(agent(server, output_type=Capital).run(paths.QUESTION))
    paths.check(isinstance(answer.output, Capital), answer)
    free = asyncio.run(agent(server, tools=[get_weather]).run(WEATHER_QUESTION))
    paths.check(free.output, free)
    later = agent(server, tools=[get_weather], output_type=Capital)
    after = asyncio.run(later.run(paths.FOLLOW_UP, message_history=answer.all_messages()))
    paths.check(isinstance(after.output, Capital), after)


def second_turn(server: Server) -> None:
    asked = agent(server)

    async def both() -> str:
        first = await asked.run(paths.QUESTION)
        return (await asked.run(paths.FOLLOW_UP, message_history=first.all_messages())).output

    paths.check(asyncio.run(both()), "no second answer")


def overflow(server: Server) -> str:
    return paths.expect_overflow(lambda: asyncio.run(agent(server).run(paths.LONG_PROMPT)), ModelHTTPError)


def cancel(server: Server) -> None:
    """A stream whose task is cancelled."""

    async def begin() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async with agent(server, max_tokens=paths.ENDLESS_TOKENS).run_stream(paths.STORY) as stream:
                async for _ in stream.stream_text(delta=True, debounce_by=None):
                    begun.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 120)
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
