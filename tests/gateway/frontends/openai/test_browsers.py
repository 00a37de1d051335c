"""Pages of other origins, paths with a slash at the end, and a model of several names, over real HTTP."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from gateway.config import GatewaySettings
from gateway.model.served_model import ServedModel
from tests.diptych.runtime.tokenizer.bundled import bundled_path
from tests.gateway.frontends.openai.test_bodies import CHAT, COMPLETIONS, good
from tests.gateway.frontends.openai.test_routes import gateway_api, root

__all__ = ["bundled_path"]

PAGE = "https://page.example"
ASKED = {"Origin": PAGE, "Access-Control-Request-Headers": "authorization,content-type"}
ALLOWED = "Access-Control-Allow-Origin"


@pytest.mark.parametrize("allowed", [PAGE, f"https://other.example,{PAGE}", "*"])
async def test_pages_of_allowed_origins_may_read_answers(
    bundled: ServedModel, redis_url: str, allowed: str
) -> None:
    async with (
        gateway_api(bundled, redis_url, cors_allow_origin=allowed) as (stack, _, _),
        aiohttp.ClientSession(root(stack)) as session,
    ):
        expected = "*" if allowed == "*" else PAGE
        async with session.options(CHAT, headers=ASKED) as answer:
            assert answer.status == 204
            assert answer.headers[ALLOWED] == expected
            assert "POST" in answer.headers["Access-Control-Allow-Methods"]
            assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        for body in ({}, {"stream": True}, {"temperature": -1}):
            asked = {**good(COMPLETIONS, bundled.card.name), **body}
            async with session.post(COMPLETIONS, json=asked, headers={"Origin": PAGE}) as answer:
                assert answer.headers[ALLOWED] == expected
        async with session.get("/v1/nothing", headers={"Origin": PAGE}) as answer:
            assert (answer.status, answer.headers[ALLOWED]) == (404, expected)
        if allowed != "*":
            async with session.get("/v1/models", headers={"Origin": "https://evil.example"}) as answer:
                assert (answer.status, ALLOWED in answer.headers) == (200, False)


async def test_pages_are_not_told_of_unless_a_flag_allows_them(bundled: ServedModel, redis_url: str) -> None:
    async with (
        gateway_api(bundled, redis_url) as (stack, _, _),
        aiohttp.ClientSession(root(stack)) as session,
    ):
        async with session.options(CHAT, headers=ASKED) as answer:
            assert (answer.status, ALLOWED in answer.headers) == (405, False)
        async with session.get("/v1/models", headers=ASKED) as answer:
            assert (answer.status, ALLOWED in answer.headers) == (200, False)


async def test_a_slash_at_the_end_of_a_path_is_ignored(bundled: ServedModel, redis_url: str) -> None:
    async with (
        gateway_api(bundled, redis_url) as (stack, _, _),
        aiohttp.ClientSession(root(stack)) as session,
    ):
        for path in ("/v1/models/", f"/v1/models/{bundled.card.name}/", "/health/", "/docs/"):
            async with session.get(path) as answer:
                assert answer.status == 200, path
        for path in (COMPLETIONS, CHAT):
            async with session.post(f"{path}/", json=good(path, bundled.card.name)) as answer:
                assert answer.status == 200, path


async def test_every_served_name_is_listed_and_answered(bundled_path: Any, redis_url: str) -> None:
    model = ServedModel.load(bundled_path, further_names=("first", "org/second"))
    async with (
        gateway_api(model, redis_url) as (stack, _, _),
        aiohttp.ClientSession(root(stack)) as session,
    ):
        async with session.get("/v1/models") as answer:
            assert [one["id"] for one in (await answer.json())["data"]] == ["first", "org/second"]
        for name in ("first", "org/second"):
            async with session.get(f"/v1/models/{name}") as answer:
                assert (await answer.json())["id"] == name
            for path in (COMPLETIONS, CHAT):
                async with session.post(path, json=good(path, name)) as answer:
                    assert (answer.status, (await answer.json())["model"]) == (200, name)
        async with session.post(COMPLETIONS, json=good(COMPLETIONS, "third")) as answer:
            assert answer.status == 404


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--served-model-name", "a", "b", "--insecure"], "a,b"),
        (["--served-model-name", "a", "--served-model-name=b"], "a,b"),
        (["--served-model-name=a,b"], "a,b"),
        (["--served_model_name", "a", "--served-model-name", "b"], "a,b"),
    ],
)
def test_lists_are_read_in_every_form(argv: list[str], names: str) -> None:
    assert GatewaySettings.read_argv(argv).served_model_name == names


def test_origins_are_checked() -> None:
    read = GatewaySettings.read_argv(["--cors-allow-origin", "https://a.b", "http://c:3000"])
    assert read.cors_allow_origin == "https://a.b,http://c:3000"
    for bad in ("a.b", "https://a.b/path"):
        with pytest.raises(Exception, match="without a path"):
            GatewaySettings.read_argv(["--cors-allow-origin", bad])
