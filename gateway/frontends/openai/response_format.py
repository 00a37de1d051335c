"""Constraints on the output, in the several ways that clients write them, as ``pb.StructuredOutput``.

OpenAI's ``response_format``; vLLM's ``structured_outputs`` and the older ``guided_*``; SGLang's ``regex``,
``ebnf`` and ``json_schema``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.frontends.openai.bodies import CommonMembers, ResponseFormat
from gateway.frontends.openai.request_builder import RequestBuilder
from gateway.request.json_values import array, string

Put = Callable[[pb.StructuredOutput, str, object], None]


def put_constraint(body: CommonMembers, builder: RequestBuilder) -> None:
    """Set at most one constraint. Raises InvalidParameter for two."""
    found: list[str] = []
    if body.response_format is not None and _put_format(body.response_format, builder):
        found.append("response_format")
    for name, (field, put) in _MEMBERS.items():
        _put_member(getattr(body, name), name, field, put, builder, found)
    if (outer := body.structured_outputs) is not None:
        for name, (field, put) in _CONSTRAINTS.items():
            value = outer.json_ if name == "json" else getattr(outer, name)
            _put_member(value, f"structured_outputs.{name}", field, put, builder, found)
    if len(found) > 1:
        raise InvalidParameter(found[1], f"excludes {found[0]}")


def dump_schema(path: str, schema: dict[str, object]) -> str:
    """Return a JSON schema as text. Raises InvalidParameter for one that is nested beyond Python's stack."""
    try:
        # ASCII: half a surrogate pair stays the escape that it came as.
        return json.dumps(schema)
    except RecursionError as error:
        raise InvalidParameter(path, "is nested too deeply") from error


def check_form(path: str, kind: str) -> None:
    """Raise UnsupportedFeature for a form of answers that is none of OpenAI's three; `path` is its member."""
    if kind not in ("text", "json_object", "json_schema"):
        raise UnsupportedFeature(f"{path}.type", "must be text, json_object or json_schema")


def put_schema(path: str, schema: dict[str, object], builder: RequestBuilder) -> None:
    """Constrain the output to a schema, the member `path` of the body."""
    builder.request.structured_output.json_schema = dump_schema(path, schema)
    builder.names["structured_output.json_schema"] = path


def put_any_object(path: str, builder: RequestBuilder) -> None:
    """Constrain the output to any JSON object, as the member `path` of the body asks."""
    builder.request.structured_output.json_object = True
    builder.names["structured_output.json_object"] = path


def _put_format(wanted: ResponseFormat, builder: RequestBuilder) -> bool:
    """Set OpenAI's form; return whether it constrains anything."""
    path = "response_format.json_schema"
    check_form("response_format", wanted.type)
    if wanted.schema_ is not None:
        if wanted.type == "text" or wanted.json_schema is not None:
            raise InvalidParameter("response_format.schema", "goes with json_object or json_schema, alone")
        put_schema("response_format.schema", wanted.schema_, builder)
    elif wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise InvalidParameter(path, "is required")
        put_schema(f"{path}.schema", wanted.json_schema.schema_, builder)
    elif wanted.json_schema is not None:
        raise InvalidParameter(path, "goes with the type json_schema only")
    elif wanted.type == "json_object":
        put_any_object("response_format", builder)
    return wanted.type != "text"


def _put_member(
    value: object, path: str, field: str, put: Put, builder: RequestBuilder, found: list[str]
) -> None:
    if value is None or value is False:
        return
    put(builder.request.structured_output, path, value)
    builder.names[f"structured_output.{field}"] = path
    found.append(path)


def _put_json(output: pb.StructuredOutput, path: str, value: object) -> None:
    """Set a schema that is given as an object or as its text."""
    if isinstance(value, str):
        output.json_schema = string(path, value)
    elif isinstance(value, dict):
        output.json_schema = dump_schema(path, value)
    else:
        raise InvalidParameter(path, "must be a JSON schema")


def _put_json_object(output: pb.StructuredOutput, path: str, value: object) -> None:
    if value is not True:
        raise InvalidParameter(path, "must be true or false")
    output.json_object = True


def _put_regex(output: pb.StructuredOutput, path: str, value: object) -> None:
    output.regex = string(path, value)


def _put_grammar(output: pb.StructuredOutput, path: str, value: object) -> None:
    output.ebnf_grammar = string(path, value)


def _put_choice(output: pb.StructuredOutput, path: str, value: object) -> None:
    values = array(path, value, limits.MAX_CHOICES)
    output.choice.values.extend(string(f"{path}[{index}]", text) for index, text in enumerate(values))


_CONSTRAINTS: Final[dict[str, tuple[str, Put]]] = {
    "json": ("json_schema", _put_json),
    "json_object": ("json_object", _put_json_object),
    "regex": ("regex", _put_regex),
    "choice": ("choice.values", _put_choice),
    "grammar": ("ebnf_grammar", _put_grammar),
}
_MEMBERS: Final[dict[str, tuple[str, Put]]] = {
    **{f"guided_{name}": made for name, made in _CONSTRAINTS.items()},
    "json_schema": ("json_schema", _put_json),
    "regex": ("regex", _put_regex),
    "ebnf": ("ebnf_grammar", _put_grammar),
}
