"""What a caller offers and what a model calls, free of protobuf."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    ``parameters`` is the JSON schema of its arguments, an object; an empty one says that there are none.
    """

    name: str
    description: str = field(default="", repr=False)
    parameters: Mapping[str, object] = field(default_factory=dict, repr=False)

    def as_template_value(self) -> dict[str, object]:
        """The shape in which transformers hands tools to chat templates, which is OpenAI's."""
        function: dict[str, object] = {"name": self.name, "description": self.description}
        parameters = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": function | {"parameters": parameters}}

    @property
    def arguments_schema(self) -> Mapping[str, object]:
        """What constrained arguments match: an object, whatever else the schema says."""
        return dict(self.parameters or {"additionalProperties": False}) | {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. ``arguments_json`` is a JSON object, as the model wrote it."""

    name: str
    arguments_json: str = field(repr=False)
    id: str = ""

    def as_template_value(self) -> dict[str, object]:
        """As above, with the arguments as an object: that is what templates write out."""
        function = {"name": self.name, "arguments": json.loads(self.arguments_json)}
        return {"id": self.id, "type": "function", "function": function}


class Mode(enum.Enum):
    AUTO = "auto"  # the model decides
    NONE = "none"  # tools are shown, calls stay text
    REQUIRED = "required"  # the output is one or more calls
    NAMED = "named"  # the output is a call of this one tool


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request, at least one, and whether they must be used."""

    tools: tuple[Tool, ...]
    mode: Mode = Mode.AUTO
    name: str = ""  # with NAMED
    single: bool = False  # the output ends with its first call

    @property
    def forced(self) -> bool:
        """Whether the output is nothing but calls."""
        return self.mode in (Mode.REQUIRED, Mode.NAMED)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that the output may call."""
        return tuple(tool for tool in self.tools if tool.name == self.name) if self.name else self.tools
