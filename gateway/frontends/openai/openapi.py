"""``/openapi.json``, made of the models of the bodies, and ``/docs``, the same as one page without scripts.

Source: OpenAPI Specification 3.1.0.
"""

from __future__ import annotations

import html
import json
from functools import cache
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from diptych import __version__
from gateway.frontends.openai.bodies import ChatBody, CompletionsBody
from gateway.frontends.openai.responses_bodies import ResponsesBody

_REFERENCE: Final = "#/components/schemas/"
_ERROR: Final = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string", "description": "What is wrong; never a value of the request."},
                "type": {"type": "string"},
                "param": {
                    "type": ["string", "null"],
                    "description": "Member at fault, as the client wrote it.",
                },
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_JSON: Final = "application/json"
_NAME: Final = {"lora_name": {"type": "string", "description": "What requests have as `model`."}}
_ADAPTER_BODIES: Final[dict[str, Any]] = {
    "LoadAdapterBody": {
        "type": "object",
        "required": ["lora_name", "lora_path"],
        "properties": {
            **_NAME,
            "lora_path": {
                "type": "string",
                "description": "PEFT folder or GGUF file, at the same place on every worker's host.",
            },
            "load_inplace": {
                "type": "boolean",
                "default": False,
                "description": "Serve it in place of another content of this name.",
            },
        },
    },
    "UnloadAdapterBody": {"type": "object", "required": ["lora_name"], "properties": _NAME},
}


def build_openapi() -> dict[str, Any]:
    """Return the description of the HTTP API."""
    _, defined = models_json_schema(
        [(body, "validation") for body in (ChatBody, CompletionsBody, ResponsesBody)],
        ref_template=f"{_REFERENCE}{{model}}",
    )
    schemas = {name: _tidied(schema) for name, schema in defined["$defs"].items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Diptych",
            "version": __version__,
            "description": "OpenAI's API, with the members that clients of vLLM and SGLang add. "
            "A member that is not listed is refused by name.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _generation("Continue a conversation", "ChatBody")},
            "/v1/completions": {"post": _generation("Continue one or several prompts", "CompletionsBody")},
            "/v1/responses": {"post": _generation("Continue a conversation, as items", "ResponsesBody")},
            "/v1/models": {"get": _operation("List the served model, and the adapters of it")},
            "/v1/models/{model}": {
                "get": {
                    **_operation("Describe a model"),
                    "parameters": [
                        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
                    ],
                }
            },
            "/v1/load_lora_adapter": {
                "post": _order("Serve a LoRA adapter (scope admin)", "LoadAdapterBody")
            },
            "/v1/unload_lora_adapter": {
                "post": _order("Serve it no more (scope admin)", "UnloadAdapterBody")
            },
        },
        "components": {
            "schemas": {**schemas, **_ADAPTER_BODIES, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(summary: str, **answers: Any) -> dict[str, Any]:
    error = {"schema": {"$ref": f"{_REFERENCE}Error"}}
    answers = answers or {_JSON: {"schema": {"type": "object"}}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer", "content": answers},
            "default": {"description": "The request was not served", "content": {_JSON: error}},
        },
    }


def _order(summary: str, body: str) -> dict[str, Any]:
    """Return an operator's call, which is answered in words."""
    return {
        **_operation(summary, **{"text/plain": {"schema": {"type": "string"}}}),
        "requestBody": {"required": True, "content": {_JSON: {"schema": {"$ref": f"{_REFERENCE}{body}"}}}},
    }


def _generation(summary: str, body: str) -> dict[str, Any]:
    events = {"schema": {"type": "string", "description": "Server-sent events, with `stream`."}}
    answers = {_JSON: {"schema": {"type": "object"}}, "text/event-stream": events}
    schema = {"$ref": f"{_REFERENCE}{body}"}
    return {
        **_operation(summary, **answers),
        "requestBody": {"required": True, "content": {_JSON: {"schema": schema}}},
    }


def _tidied(schema: Any) -> Any:
    """Return a schema without generated titles, null and members that are not implemented."""
    if isinstance(schema, list):
        return [_tidied(one) for one in schema if one != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    tidy = {name: _tidied(value) for name, value in schema.items() if name not in ("title", "properties")}
    if tidy.get("default", 0) is None:
        del tidy["default"]
    if len(tidy.get("anyOf", ())) == 1:
        tidy |= tidy.pop("anyOf")[0]
    if "properties" in schema:
        members = {name: _tidied(value) for name, value in schema["properties"].items()}
        tidy["properties"] = {name: member for name, member in members.items() if member}
    return tidy


_STYLE: Final = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid #8884;padding:.3rem .6rem;text-align:left;
vertical-align:top}code{font-family:ui-monospace,monospace}:root{color-scheme:light dark}"""


def render_docs(openapi: dict[str, Any]) -> str:
    """Return the description as an HTML page that loads nothing else."""
    info = openapi["info"]
    parts = [f"<h1>{_text(info['title'])} {_text(info['version'])}</h1><p>{_text(info['description'])}</p>"]
    parts.append('<p>For programs: <a href="openapi.json">openapi.json</a></p>')
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {_text(path)}</code></h2>")
            parts.append(f"<p>{_text(operation['summary'])}</p>")
            if "requestBody" in operation:
                parts.append(f"<p>Body: {_type(operation['requestBody']['content'][_JSON]['schema'])}</p>")
    for name, schema in openapi["components"]["schemas"].items():
        parts.append(
            f'<h2 id="{_text(name)}">{_text(name)}</h2><p>{_text(schema.get("description", ""))}</p>'
        )
        parts.append(_table(schema))
    head = f'<meta charset="utf-8"><title>{_text(info["title"])}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _table(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = ["<tr><th>Member</th><th>Type</th><th>Meaning</th></tr>"]
    for name, member in schema.get("properties", {}).items():
        needed = " (required)" if name in required else ""
        cells = (f"<code>{_text(name)}</code>{needed}", _type(member), _text(member.get("description", "")))
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _type(schema: dict[str, Any]) -> str:
    """Return the HTML of a type, with its range."""
    if "$ref" in schema:
        name = _text(schema["$ref"].removeprefix(_REFERENCE))
        return f'<a href="#{name}">{name}</a>'
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[union]))
    kind = schema.get("type", "any")
    if kind == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    ends = {"minimum": "≥", "exclusiveMinimum": "&gt;", "maximum": "≤"}
    bounds = ", ".join(f"{sign} {schema[name]:g}" for name, sign in ends.items() if name in schema)
    words = " or ".join(kind) if isinstance(kind, list) else str(kind)
    return f"{_text(words)} {bounds}".rstrip()


def _text(words: str) -> str:
    return html.escape(words)


@cache
def openapi_pages() -> dict[str, tuple[str, bytes]]:
    """Return (content type, body) by path, made once."""
    openapi = build_openapi()
    return {
        "/openapi.json": (_JSON, json.dumps(openapi).encode()),
        "/docs": ("text/html", render_docs(openapi).encode()),
    }
