"""The description of the HTTP API: complete, true of the bodies that are read, and served."""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp
import jsonschema
import pytest

from gateway.frontends.openai.bodies import IGNORED, ROWS
from gateway.frontends.openai.openapi import build_openapi, render_docs
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_bodies import COMPLETIONS, good
from tests.gateway.frontends.openai.test_routes import gateway_api, root

BODIES = {COMPLETIONS: "CompletionsBody", "/v1/chat/completions": "ChatBody"}


def schema(path: str) -> dict[str, Any]:
    openapi = build_openapi()
    return {"$ref": f"#/components/schemas/{BODIES[path]}", "components": openapi["components"]}


@pytest.mark.parametrize("path", BODIES)
def test_schema_allows_a_body_with_parameters(path: str) -> None:
    body = {**good(path, "m"), "temperature": 0.5, "stop": "x", "top_k": 3, "logit_bias": {"1": 2}}
    jsonschema.validate(body, schema(path))


@pytest.mark.parametrize("members", [{"temperature": -1}, {"top_p": 0}, {"n": 129}, {"nothing": 1}])
def test_schema_refuses_what_the_server_refuses(members: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good(COMPLETIONS, "m"), **members}, schema(COMPLETIONS))


@pytest.mark.parametrize("path", BODIES)
def test_every_parameter_is_described(path: str) -> None:
    members = build_openapi()["components"]["schemas"][BODIES[path]]["properties"]
    for name, row in ROWS.items():
        assert members[name]["description"] == row.about
    assert members.keys() > set(IGNORED)


def test_references_are_defined() -> None:
    openapi = build_openapi()
    names = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(openapi)))
    assert names <= openapi["components"]["schemas"].keys()


def test_docs_load_nothing() -> None:
    page = render_docs(build_openapi())
    assert not re.search(r"<script|<link|<img|https?://", page)
    assert all(f"<code>{name}</code>" in page for name in ROWS)


async def test_pages_are_served(bundled: ServedModel, redis_url: str) -> None:
    async with (
        gateway_api(bundled, redis_url) as (stack, _, _),
        aiohttp.ClientSession(root(stack)) as session,
    ):
        async with session.get("/openapi.json") as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            assert (await answer.json())["openapi"] == "3.1.0"
        async with session.get("/docs") as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert "<h1>Diptych" in await answer.text()
        async with session.post("/docs") as answer:
            assert answer.status == 405
