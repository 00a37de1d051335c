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
from gateway.frontends.openai.request_builder import RequestBuilder
from gateway.request.json_members import Members, array, string

Put = Callable[[pb.StructuredOutput, str, object], None]


def read_structure(body: Members, draft: RequestBuilder) -> None:
    """At most one constraint. Raises `InvalidParameter` for two."""
    found: list[str] = []
    _response_format(body, draft, found)
    for name, (field, put) in _FIELDS.items():
        _field(body, name, field, put, draft, found)
    outer = body.nested("structured_outputs")
    if outer is not None:
        for name, (field, put) in _STRUCTURED_OUTPUTS.items():
            _field(outer, name, field, put, draft, found)
        outer.finish()
    if len(found) > 1:
        raise InvalidParameter(found[1], f"excludes {found[0]}")


def _response_format(body: Members, draft: RequestBuilder, found: list[str]) -> None:
    wanted = body.nested("response_format")
    if wanted is None:
        return
    output = draft.request.structured_output
    kind = wanted.required("type", wanted.string("type"))
    if kind == "json_object":
        output.json_object = True
        draft.names["structured_output.json_object"] = "response_format"
    elif kind == "json_schema":
        given = wanted.required("json_schema", wanted.nested("json_schema"))
        given.string("name")
        given.string("description")
        given.flag("strict")  # a schema always holds
        path = given.path("schema")
        _put_json(output, path, given.required("schema", given.raw("schema")))
        given.finish()
        draft.names["structured_output.json_schema"] = path
    elif kind != "text":
        raise UnsupportedFeature(wanted.path("type"), "must be text, json_object or json_schema")
    wanted.finish()
    if kind != "text":
        found.append("response_format")


def _field(body: Members, name: str, field: str, put: Put, draft: RequestBuilder, found: list[str]) -> None:
    value = body.take(name)
    if value is None or value is False:
        return
    path = body.path(name)
    put(draft.request.structured_output, path, value)
    draft.names[f"structured_output.{field}"] = path
    found.append(path)


def _put_json(output: pb.StructuredOutput, path: str, value: object) -> None:
    """A schema, as an object or as its text."""
    if isinstance(value, str):
        output.json_schema = string(path, value)
    elif isinstance(value, dict):
        try:
            # ASCII: half a surrogate pair stays the escape that it came as.
            output.json_schema = json.dumps(value)
        except RecursionError as error:
            raise InvalidParameter(path, "is nested too deeply") from error
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


_STRUCTURED_OUTPUTS: Final[dict[str, tuple[str, Put]]] = {
    "json": ("json_schema", _put_json),
    "json_object": ("json_object", _put_json_object),
    "regex": ("regex", _put_regex),
    "choice": ("choice.values", _put_choice),
    "grammar": ("ebnf_grammar", _put_grammar),
}
_FIELDS: Final[dict[str, tuple[str, Put]]] = {
    **{f"guided_{name}": made for name, made in _STRUCTURED_OUTPUTS.items()},
    "json_schema": ("json_schema", _put_json),
    "regex": ("regex", _put_regex),
    "ebnf": ("ebnf_grammar", _put_grammar),
}
