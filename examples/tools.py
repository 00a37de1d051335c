"""A tool that the model has to call, the call's result, and the answer made from it."""

import json
import sys

from diptych.client import CallFailed, Client, Message, Tool, chat

WEATHER = Tool(
    "get_weather",
    "The weather in a city at this moment",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome", "Tokyo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


def get_weather(city: str) -> str:
    return json.dumps({"city": city, "celsius": 21})


def main(address: str) -> None:
    with Client(address) as client:
        turns = chat("What is the weather in Paris?")
        # "auto" leaves it to the model. The schema bounds what it may write as arguments.
        asked = client.generate(turns, tools=[WEATHER], tool_choice="required", max_tokens=200)
        print("finished:", asked.finish_reason)
        turns.append({"role": "assistant", "content": asked.text, "tool_calls": asked.tool_calls})
        for call in asked.tool_calls:
            print("call:", call.name, call.arguments)
            result: Message = {
                "role": "tool",
                "tool_call_id": call.id,
                "content": get_weather(**call.arguments),
            }
            turns.append(result)

        answer = client.generate(turns, tools=[WEATHER], tool_choice="none", max_tokens=32)
        print("answer:", answer.text)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2] or ["127.0.0.1:50051"])
    except CallFailed as failure:
        if "chat.tools" not in failure.violations:
            raise
        sys.exit(f"{failure.violations['chat.tools']}; serve one that has: diptych up --model PATH")
