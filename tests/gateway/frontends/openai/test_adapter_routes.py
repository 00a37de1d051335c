"""Adapters over HTTP: chosen by model, listed with their parent, loaded and unloaded by vLLM's calls."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from gateway.model.served_model import ServedModel
from tests.gateway import running_gateway
from tests.gateway.access.keys import Keys
from tests.gateway.access.locked_gateway import http, serving
from tests.gateway.adapters.folders import write
from tests.gateway.running_gateway import Stack

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(autouse=True)
def own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_gateway, "DIGEST", uuid.uuid4().hex * 2)


async def models(stack: Stack, key: str) -> list[tuple[str, str | None]]:
    _, text, _ = await http(stack, "/v1/models", key)
    return [(one["id"], one["parent"]) for one in json.loads(text)["data"]]


def completion(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "Hello", "max_tokens": 3}


async def test_load_use_and_unload_over_http(bundled: ServedModel, redis_url: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.jsonl")
    user, operator = keys.add("acme"), keys.add("acme", "admin")
    base, body = bundled.card.name, {"lora_name": "legal", "lora_path": str(write(tmp_path / "legal"))}
    async with serving(bundled, redis_url, keys) as stack:
        assert (await http(stack, LOAD, user, body))[0] == 403
        assert (await http(stack, LOAD, "", body))[0] == 401
        status, text, _ = await http(stack, LOAD, operator, body)
        assert (status, text) == (200, "Success: LoRA adapter 'legal' added successfully.")
        assert await models(stack, user) == [(base, None), ("legal", base)]
        status, text, _ = await http(stack, "/v1/completions", user, completion("legal"))
        assert (status, json.loads(text)["model"]) == (200, "legal")
        status, text, _ = await http(stack, "/v1/models/legal", user)
        assert (status, json.loads(text)["parent"]) == (200, base)
        other = {**body, "lora_path": str(write(tmp_path / "other", "b"))}
        assert (await http(stack, LOAD, operator, other))[0] == 409
        assert (await http(stack, LOAD, operator, {**other, "load_inplace": True}))[0] == 200
        assert (await http(stack, UNLOAD, user, {"lora_name": "legal"}))[0] == 403
        status, text, _ = await http(stack, UNLOAD, operator, {"lora_name": "legal", "lora_int_id": 1})
        assert (status, text) == (200, "Success: LoRA adapter 'legal' removed successfully.")
        assert (await http(stack, UNLOAD, operator, {"lora_name": "legal"}))[0] == 404
        assert (await http(stack, "/v1/completions", user, completion("legal")))[0] == 404
        assert await models(stack, user) == [(base, None)]


async def test_a_bad_body_is_refused_by_its_own_members(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.jsonl")
    operator = keys.add("acme", "admin")
    async with serving(bundled, redis_url, keys) as stack:
        for body, param in (
            ({"lora_name": "a"}, "lora_path"),
            ({"lora_path": "/a"}, "lora_name"),
            ({"lora_name": 1, "lora_path": "/a"}, "lora_name"),
            ({"lora_name": "a b", "lora_path": "/a"}, "lora_name"),
            ({"lora_name": "a", "lora_path": str(tmp_path / "nowhere")}, "lora_path"),
            ({"lora_name": "a", "lora_path": "/a", "load_inplace": 1}, "load_inplace"),
            ({"lora_name": "a", "lora_path": "/a", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        ):
            status, text, _ = await http(stack, LOAD, operator, body)
            error = json.loads(text)["error"]
            assert (status, error["param"]) == (400, param), text


async def test_a_key_sees_and_uses_its_own_adapters(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.jsonl")
    all_, some, none = keys.add("acme"), keys.add("acme"), keys.add("other")
    keys.entries[some]["adapters"] = ["team-a/*"]
    keys.entries[none]["adapters"] = []
    keys.write()
    operator = keys.add("acme", "admin")
    async with serving(bundled, redis_url, keys) as stack:
        for name in ("team-a/one", "team-b/two"):
            body = {"lora_name": name, "lora_path": str(write(tmp_path / name, name))}
            assert (await http(stack, LOAD, operator, body))[0] == 200
        listed = [[name for name, _ in (await models(stack, key))[1:]] for key in (all_, some, none)]
        assert listed == [["team-a/one", "team-b/two"], ["team-a/one"], []]
        for key, name, status in (
            (all_, "team-b/two", 200),
            (some, "team-a/one", 200),
            (some, "team-b/two", 404),
            (none, "team-a/one", 404),
            (none, bundled.card.name, 200),
        ):
            assert (await http(stack, "/v1/completions", key, completion(name)))[0] == status
        refused = await http(stack, "/v1/completions", some, completion("team-b/two"))
        unknown = await http(stack, "/v1/completions", some, completion("team-b/none"))
        # Whether there is one is no one else's business.
        assert refused[1].replace("team-b/two", "team-b/none") == unknown[1]


async def test_without_keys_only_a_loopback_port_loads(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    body = {"lora_name": "legal", "lora_path": str(write(tmp_path))}
    workers = running_gateway.ScriptedPrefill(), running_gateway.ScriptedDecode()
    async with running_gateway.running(bundled, redis_url, *workers, host="0.0.0.0", insecure=True) as stack:
        status, text, _ = await http(stack, LOAD, "", body)
        assert status == 403
        assert "admin port" in text
    workers = running_gateway.ScriptedPrefill(), running_gateway.ScriptedDecode()
    async with running_gateway.running(bundled, redis_url, *workers) as stack:
        assert (await http(stack, LOAD, "", body))[0] == 200
