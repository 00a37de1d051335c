"""Arguments that a format writes as text, one by one and not as JSON: their types, and their grammar.

A string stands as it is, any other value as JSON. Which of them a text is, the tool's schema says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from diptych.runtime.grammar.matcher import embedded_schema
from gateway.tools.json_calls import quoted
from gateway.tools.tool import Tool

Schema = Mapping[str, Any]
_STRING: Final = "string"
# What models of templates in Python write for JSON's constants.
_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}
_TYPE_NAMES: Final = {str: _STRING, bool: "boolean", int: "integer", float: "number", type(None): "null"}
_DEFINITIONS: Final = ("$defs", "definitions")


class WrittenArguments:
    """Arguments of the calls of ``tools``."""

    def __init__(self, tools: Sequence[Tool] | None) -> None:
        self._properties = {tool.name: _properties(tool.parameters) for tool in tools or ()}

    def as_json(self, name: str, pairs: Iterable[tuple[str, str]], *, complete: bool) -> str:
        """Return the JSON object of written arguments; without its end if more may follow."""
        members = (
            f"{json.dumps(key, ensure_ascii=False)}: {self._value(name, key, text)}" for key, text in pairs
        )
        return "{" + ", ".join(members) + ("}" if complete else "")

    def _value(self, name: str, key: str, text: str) -> str:
        schema = self._properties.get(name, {}).get(key)
        types = {_STRING} if schema is None else _types(schema)
        if "null" in types and text in ("null", "None"):
            return "null"
        if _STRING in types:
            return json.dumps(text, ensure_ascii=False)
        text = _CONSTANTS.get(text.strip(), text.strip())
        try:
            json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        return text


def argument_rules(
    tool: Tool, number: int, before: Callable[[str], str], after: str, mark: str, key: str
) -> tuple[str, list[str]]:
    """Return the Lark terms of a tool's arguments, in the schema's order, and the rules that they use.

    An enum, a constant, a string's lengths and the types are held to; a string's pattern and format are not.

    Args:
        tool: that is called.
        number: of the tool; keeps its rules apart.
        before: makes the literal text before an argument from its name.
        after: the text after an argument.
        mark: the part of it that no string contains.
        key: pattern of names where the schema leaves them open.
    """
    schema = tool.parameters
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    terms: list[str] = []
    rules: list[str] = []
    for index, (name, one) in enumerate(_properties(schema).items()):
        rule, text = f"argument{number}x{index}", f"TEXT{number}X{index}"
        value = _value_term(one, definitions)
        if value is None:
            rules.append(f"{text}: {_text(after, mark, one.get('minLength', 0), one.get('maxLength'))}")
        term = text if value is None else f"{value} {quoted(after)}"
        rules.append(f"{rule}: {quoted(before(name))} {term}")
        terms.append(rule if name in required else f"{rule}?")
    if schema and not terms and schema.get("additionalProperties") is not False:
        head, tail = before("\0").split("\0")
        rules.append(f"ANY{number}: {_text(after, mark)}")
        rules.append(f"any{number}: {quoted(head)} /{key}/ {quoted(tail)} ANY{number}")
        terms.append(f"any{number}*")
    return " ".join(terms), rules


def _value_term(schema: Schema, definitions: Schema) -> str | None:
    """Return the Lark term of a value; None for any string."""
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and allowed:
        texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in allowed]
        return "(" + " | ".join(map(quoted, texts)) + ")"
    return None if _STRING in _types(schema) else embedded_schema({**schema, **definitions})


def _text(after: str, mark: str, least: int = 0, most: int | None = None) -> str:
    """Return the definition of a terminal: a text of so many characters without ``mark``, and its end.

    One terminal, since a text of its own would go on into the end: it ends where ``mark`` comes.
    """
    without = "".join(f"\\x{{{ord(char):x}}}" for char in mark)
    limits = f"{{{least},{'' if most is None else most}}}"
    return f"(/(?s:.{limits})/ & ~/(?s:.*){without}(?s:.*)/) {quoted(after)}"


def _properties(schema: Schema) -> dict[str, Schema]:
    found = schema.get("properties")
    if not isinstance(found, dict):
        return {}
    return {name: one if isinstance(one, dict) else {} for name, one in found.items()}


def _types(schema: Schema) -> set[str]:
    """Return the types that a schema allows; a string where it says nothing."""
    if "const" in schema:
        return {_TYPE_NAMES.get(type(schema["const"]), "object")}
    if isinstance(schema.get("enum"), list):
        return {_TYPE_NAMES.get(type(one), "object") for one in schema["enum"]}
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {one for one in types if isinstance(one, str)}
    either = [one for branch in ("anyOf", "oneOf", "allOf") for one in schema.get(branch, ())]
    found = {name for one in either if isinstance(one, dict) for name in _types(one)}
    return found or ({"object"} if "$ref" in schema or "properties" in schema else {_STRING})


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
