"""The status page of a real gateway: whom it is shown to, what it says, and that it needs no other server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.frontends.status.page import PAGE
from gateway.model.served_model import ServedModel
from tests.gateway.access.keys import Keys
from tests.gateway.access.locked_gateway import http, serving
from tests.gateway.running_gateway import Stack, running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering


async def get(stack: Stack, path: str, key: str = "") -> tuple[int, Any, str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{stack.gateway.http_port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        kind = answer.content_type
        said = await answer.json() if kind == "application/json" else await answer.text()
        return answer.status, said, answer.headers.get("Content-Security-Policy", "")


async def test_status_is_for_operators_and_has_workers_and_load(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.jsonl")
    user, operator = keys.add("acme"), keys.add("ops", "admin")
    async with serving(bundled, redis_url, keys) as stack:
        page = await get(stack, "/admin")
        assert page[:2] == (200, PAGE)  # no secret is in it
        assert "default-src 'none'" in page[2]
        assert (await get(stack, "/admin/status"))[0] == 401
        assert (await get(stack, "/admin/status", user))[0] == 403
        await stack.stub.Generate(stack.request(), metadata=(("authorization", f"Bearer {user}"),))
        await stack.until_idle()
        status, said, _ = await get(stack, "/admin/status", operator)
        assert status == 200
        assert (said["model"], said["ready"]) == (bundled.card.name, True)
        load = said["load"]
        assert {(one["role"], one["state"]) for one in load["workers"]} == {
            ("prefill", "ready"),
            ("decode", "ready"),
        }
        assert load["phases"] == {"queued": 0, "routing": 0, "prefill": 0, "decode": 0}
        counts = (load["generated_tokens"], load["prompt_tokens"], load["workers"][0]["load"]["free_blocks"])
        assert all(isinstance(count, int) for count in counts)
        assert load["generated_tokens"] == 3
        assert (await http(stack, "/admin/status", operator, {}))[0] == 405


async def test_status_without_keys_is_shown_on_loopback_only(bundled: ServedModel, redis_url: str) -> None:
    for host, expected in (("127.0.0.1", 200), ("0.0.0.0", 403)):
        decode = ScriptedDecode(answering([1]))
        async with running(bundled, redis_url, ScriptedPrefill(), decode, host=host, insecure=True) as stack:
            status, said, _ = await get(stack, "/admin/status")
            assert status == expected
            assert expected == 200 or "diptych top" in said["error"]["message"]


def test_page_names_no_other_server_and_writes_no_html() -> None:
    assert not re.search(r"https?://|@import|src=|href=", PAGE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE)


def test_script_of_the_page_is_valid(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no JavaScript engine")
    [script] = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)
    (tmp_path / "page.js").write_text(script)
    done = subprocess.run(
        [node, "--check", tmp_path / "page.js"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
