"""The reference of the Python client: signatures and docstrings of `diptych.client` as Markdown."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import get_type_hints

import diptych.client
from diptych.client import AsyncClient, Client, Prompt

HEAD = """# Python client

`from diptych import Client, AsyncClient, chat, CallFailed`. It needs grpcio, protobuf and googleapis-common-protos.

A `Prompt` is a text, the turns of a chat (`Message`), or a list of token ids. `**options` are the fields of
[`Options`](#options); [request parameters](parameters.md) has their meanings, ranges and defaults.

"""
_MODULES = re.compile(r"\b(?:collections\.abc|typing|diptych\.client(?:\.[a-z_]+)?)\.")


def python_page() -> str:
    """Return the reference of the Python client."""
    parts = [HEAD]
    for cls in (Client, AsyncClient):
        parts.append(_entry(f"## {cls.__name__}", _signature(cls.__name__, cls), cls))
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                kind = "async " if inspect.iscoroutinefunction(method) else ""
                parts.append(_entry(f"### {cls.__name__}.{name}", kind + _signature(name, method), method))
    parts.append(_entry("## chat", _signature("chat", diptych.client.chat), diptych.client.chat))
    for name in sorted(diptych.client.__all__):
        cls = getattr(diptych.client, name)
        if inspect.isclass(cls) and cls not in (Client, AsyncClient):
            parts.append(f"## {name}\n\n{_text(cls)}\n\n{_fields(cls)}")
    return "".join(parts)


def _entry(heading: str, signature: str, of: object) -> str:
    return f"{heading}\n\n```\n{signature}\n```\n\n{_text(of)}\n\n"


def _signature(name: str, of: Callable[..., object]) -> str:
    """Return a call as its definition has it, one parameter a line where they are many."""
    found = inspect.signature(of)
    parameters: list[str] = []
    for one in found.parameters.values():
        if one.name == "self":
            continue
        if one.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        stars = "**" if one.kind is inspect.Parameter.VAR_KEYWORD else ""
        default = "" if one.default is inspect.Parameter.empty else f" = {one.default!r}"
        parameters.append(f"{stars}{one.name}: {_type(one.annotation)}{default}")
    returned = "" if inspect.isclass(of) else f" -> {_type(found.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) <= 100:
        return line
    return f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){returned}"


def _type(annotation: object) -> str:
    """Return a type as it is written where its names are imported."""
    if annotation == Prompt:
        return "Prompt"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace(f"*{inspect.formatannotation(Prompt)}", "Prompt")
    text = re.sub(r"\*?<class '([^']+)'>", r"\1", text)
    return _MODULES.sub("", text).replace("NoneType", "None")


def _text(of: object) -> str:
    return (inspect.getdoc(of) or "").replace("Args:\n", "Arguments:\n\n").replace("    ", "- ").strip()


def _fields(cls: type) -> str:
    if dataclasses.is_dataclass(cls):
        names: dict[str, object] = {one.name: one.type for one in dataclasses.fields(cls)}
    else:
        names = dict(get_type_hints(cls))
    rows = [
        f"| `{name}` | `{_type(kind).replace('|', '∣')}` |\n"
        for name, kind in names.items()
        if not name.startswith("_")
    ]
    return "| field | type |\n|---|---|\n" + "".join(rows) + "\n" if rows else ""
