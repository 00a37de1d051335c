"""Tools, tool calls and tool choice as plain values, free of protobuf."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from diptych.runtime.strict_json import STRICT_JSON


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that the model may call.

    ``parameters`` is the JSON schema of its arguments object; empty: there are no arguments.
    """

    name: str
    description: str = field(default="", repr=False)
    parameters: Mapping[str, object] = field(default_factory=dict, repr=False)

    def as_template_value(self) -> dict[str, object]:
        """Return the tool as transformers passes it to chat templates, which is OpenAI's shape."""
        function: dict[str, object] = {"name": self.name, "description": self.description}
        parameters = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": function | {"parameters": parameters}}

    @property
    def arguments_schema(self) -> Mapping[str, object]:
        """The JSON schema that constrained arguments match, always of an object."""
        return dict(self.parameters or {"additionalProperties": False}) | {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call. ``arguments_json`` is a JSON object as the model wrote it; in history it may be any text.

    Where calls come in pieces, only the first piece of a call has its name and id, and the last is not
    ``partial``.
    """

    name: str
    arguments_json: str = field(repr=False)
    id: str = ""
    partial: bool = False

    def as_template_value(self, *, arguments_as_text: bool = False) -> dict[str, object]:
        """Return the call in the same shape, its arguments as an object, which most templates serialise."""
        arguments = self.arguments_json if arguments_as_text else self.arguments
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}

    @property
    def arguments(self) -> dict[str, object] | str:
        """The arguments; their text where a model broke off or wrote no JSON object."""
        try:
            read = STRICT_JSON.decode(self.arguments_json)
            json.dumps(read, ensure_ascii=False).encode("utf-8")  # it may escape half of a surrogate pair
        except (ValueError, RecursionError):
            return self.arguments_json
        return read if isinstance(read, dict) else self.arguments_json


class Mode(enum.Enum):
    """Tool choice of a request."""

    AUTO = "auto"  # the model decides
    NONE = "none"  # tools are shown, calls stay text
    REQUIRED = "required"  # the output is one or more calls
    NAMED = "named"  # the output is a call of this one tool


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Tools of a request, at least one, and its tool choice."""

    tools: tuple[Tool, ...]
    mode: Mode = Mode.AUTO
    name: str = ""  # with NAMED
    single: bool = False  # the output ends with its first call

    @property
    def forced(self) -> bool:
        """True if the output is calls only."""
        return self.mode in (Mode.REQUIRED, Mode.NAMED)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the output may call."""
        return tuple(tool for tool in self.tools if tool.name == self.name) if self.name else self.tools
