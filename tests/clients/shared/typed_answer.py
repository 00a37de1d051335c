"""Typed answer and tool that the drivers ask for: plain schemas, with nothing that helps a grammar."""

from typing import Literal

from pydantic import BaseModel


class Capital(BaseModel):
    """A country and its capital."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the current weather of a city.

    Args:
        city: the city's name
    """
    return f"18 degrees and sun in {city}"


WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
