"""`/v1/files` and `/v1/batches` over real sockets with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from gateway.access.key_file import digest_of
from gateway.frontends.batches.records import WINDOW_S
from gateway.frontends.batches.runner import BatchRunner
from gateway.frontends.batches.store import BatchStore, StoreLimits
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_routes import TEXT, gateway_api, ids_of, post
from tests.gateway.running_gateway import until
from tests.gateway.scripted_workers import ScriptedDecode, answering

CHATS = "/v1/chat/completions"
TIMEOUT_S = 30.0


def line(model: ServedModel, number: int, **body: Any) -> dict[str, Any]:
    """Return a request of a batch; its question names its number."""
    members = {
        "model": model.card.name,
        "messages": [{"role": "user", "content": f"Count to {number}:"}],
        "max_tokens": 64,
        **body,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHATS, "body": members}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def attached(decode: ScriptedDecode) -> list[Any]:
    return [message for name, message in decode.sent if name == "attach"]


def files_of(folder: Path, pattern: str = "*") -> list[Path]:
    return [path for path in folder.rglob(pattern) if path.is_file()]


async def create(client: openai.AsyncOpenAI, lines: list[Any] | bytes, endpoint: Any = CHATS) -> Batch:
    data = lines if isinstance(lines, bytes) else jsonl(lines)
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    """Wait for the end of a batch."""
    async with asyncio.timeout(TIMEOUT_S):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a file of results by their ids, each of which occurs once."""
    if file_id is None:
        return {}
    content = await client.files.content(file_id)
    lines = [json.loads(text) for text in content.text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


async def test_batch_has_one_result_for_each_line(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    lines = [line(bundled, number) for number in range(40)]
    lines[7]["body"]["temperature"] = -1
    lines[9]["body"]["stream"] = True
    async with gateway_api(bundled, redis_url, batch_dir=tmp_path / "b", batch_concurrency=8) as (
        _,
        client,
        decode,
    ):
        batch = await ended(client, await create(client, lines))
        outputs = await results(client, batch.output_file_id)
        errors = await results(client, batch.error_file_id)
        begun = await decode.wait_for("attach", 38)
        listed = [one.id async for one in client.batches.list(limit=1)]
        files = [(one.id, one.purpose) async for one in client.files.list()]
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"a": "b"}, None)
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (40, 38, 2)
    assert outputs.keys() | errors.keys() == {one["custom_id"] for one in lines}
    assert errors.keys() == {"line-7", "line-9"}
    assert errors["line-7"]["response"]["status_code"] == 400
    assert errors["line-7"]["response"]["body"]["error"]["param"] == "temperature"
    response = outputs["line-3"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["message"]["content"] == TEXT
    assert response["body"]["object"] == "chat.completion"
    assert len(begun) == 38
    assert listed == [batch.id]
    assert sorted(purpose for _, purpose in files) == ["batch", "batch_output", "batch_output"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        pytest.param(lambda lines: lines.append(dict(lines[0])), "custom_id", id="same-id"),
        pytest.param(lambda lines: lines[1].pop("custom_id"), "custom_id", id="no-id"),
        pytest.param(lambda lines: lines[1].update(url="/v1/completions"), "url", id="other-url"),
        pytest.param(lambda lines: lines[1].update(method="GET"), "method", id="method"),
        pytest.param(lambda lines: lines[1].update(body=[]), "body", id="body"),
        pytest.param(lambda lines: lines.clear(), None, id="empty"),
        pytest.param(lambda lines: lines.append([1]), None, id="no-object"),
    ],
)
async def test_bad_line_fails_the_batch(
    bundled: ServedModel, redis_url: str, tmp_path: Path, change: Any, param: str | None
) -> None:
    lines: list[Any] = [line(bundled, number) for number in range(3)]
    change(lines)
    async with gateway_api(bundled, redis_url, batch_dir=tmp_path) as (_, client, decode):
        batch = await ended(client, await create(client, lines))
        assert not attached(decode)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [fault.param for fault in batch.errors.data] == [param]


async def test_cancelled_batch_says_so_of_what_did_not_run(
    bundled: ServedModel, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, runs, watch = asyncio.Event(), list[Any](), BatchRunner._watch

    async def watched(runner: BatchRunner, run: Any) -> None:
        runs.append(run)
        await watch(runner, run)

    monkeypatch.setattr(BatchRunner, "_watch", watched)

    async def held(decode: ScriptedDecode, work: Any) -> None:
        await release.wait()
        await answering(ids_of(bundled))(decode, work)

    lines = [line(bundled, number) for number in range(12)]
    settings: dict[str, Any] = {"batch_dir": tmp_path, "batch_concurrency": 3}
    async with gateway_api(bundled, redis_url, held, **settings) as (_, client, decode):
        begun = await create(client, lines)
        await decode.wait_for("attach", 3)
        assert (await client.batches.cancel(begun.id)).status == "cancelling"
        with pytest.raises(openai.BadRequestError):
            await client.files.delete(begun.input_file_id)
        await until(lambda: [run.ending for run in runs] == ["cancelled"])
        release.set()
        batch = await ended(client, begun)
        outputs, errors = (
            await results(client, batch.output_file_id),
            await results(client, batch.error_file_id),
        )
        with pytest.raises(openai.BadRequestError):
            await client.batches.cancel(begun.id)
        assert (await client.files.delete(begun.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(begun.input_file_id)
    assert batch.status == "cancelled"
    assert (len(outputs), len(errors)) == (3, 9)
    assert outputs.keys().isdisjoint(errors)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}


async def test_another_gateway_goes_on_with_a_batch(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    """The first one answers five lines and holds the rest until it ends; it writes a piece of one more."""
    answered = 0

    async def five(decode: ScriptedDecode, work: Any) -> None:
        nonlocal answered
        answered += 1
        if answered <= 5:
            await answering(ids_of(bundled))(decode, work)

    lines = [line(bundled, number) for number in range(20)]
    async with gateway_api(bundled, redis_url, five, batch_dir=tmp_path) as (_, client, decode):
        begun = await create(client, lines)
        await decode.wait_for("attach", 20 - 4)
        await asyncio.sleep(0.5)
    (output,) = files_of(tmp_path, "output.jsonl")
    assert len(output.read_bytes().splitlines()) == 5
    with output.open("ab") as file:
        file.write(b'{"id": "batch_req_9", "custom_id": "li')
    async with gateway_api(bundled, redis_url, batch_dir=tmp_path) as (_, client, decode):
        batch = await ended(client, begun)
        outputs = await results(client, batch.output_file_id)
        assert len(attached(decode)) == 15
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert outputs.keys() == {one["custom_id"] for one in lines}


async def test_batch_past_its_window_expires(bundled: ServedModel, redis_url: str, tmp_path: Path) -> None:
    async def silent(decode: ScriptedDecode, work: Any) -> None:
        pass

    lines = [line(bundled, number) for number in range(3)]
    async with gateway_api(bundled, redis_url, silent, batch_dir=tmp_path, batch_concurrency=2) as (
        _,
        client,
        decode,
    ):
        begun = await create(client, lines)
        await decode.wait_for("attach", 2)
    store = BatchStore(tmp_path, StoreLimits(1 << 20, 1 << 30))
    record = store.batch("", begun.id)
    assert record.status == "in_progress"
    record.created_at = int(time.time()) - WINDOW_S - 5
    store.save(record)
    async with gateway_api(bundled, redis_url, batch_dir=tmp_path, batch_concurrency=2) as (
        _,
        client,
        decode,
    ):
        batch = await ended(client, begun)
        outputs, errors = (
            await results(client, batch.output_file_id),
            await results(client, batch.error_file_id),
        )
    assert batch.status == "expired"
    assert outputs.keys() | errors.keys() == {one["custom_id"] for one in lines}
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}


async def test_tenants_do_not_see_one_another(bundled: ServedModel, redis_url: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    rows = [{"name": n, "sha256": digest_of(f"k-{n}").hex(), "tenant": f"t{n}"} for n in ("1", "2")]
    keys.write_bytes(jsonl(rows))
    keys.chmod(0o600)
    settings: dict[str, Any] = {"batch_dir": tmp_path / "b", "api_keys_file": keys}
    async with gateway_api(bundled, redis_url, **settings) as (stack, client, _):
        one, two = client.with_options(api_key="k-1"), client.with_options(api_key="k-2")
        batch = await ended(one, await create(one, [line(bundled, 1)]))
        assert batch.status == "completed"
        assert [found async for found in two.batches.list()] == []
        assert [found async for found in two.files.list()] == []
        for call in (two.batches.retrieve(batch.id), two.files.retrieve(batch.input_file_id)):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError):
            await two.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h"
            )
        assert (await post(stack, "/v1/batches", {}))[0] == 401
    names = [path.name for path in (tmp_path / "b").rglob("*")]
    assert not any("t1" in name for name in names)
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "b").rglob("*")}
    assert modes == {0}


async def test_batch_of_a_removed_key_ends(bundled: ServedModel, redis_url: str, tmp_path: Path) -> None:
    def write(*names: str) -> Path:
        rows = [{"name": n, "sha256": digest_of(f"k-{n}").hex(), "tenant": "t"} for n in names]
        keys = tmp_path / "keys.jsonl"
        keys.write_bytes(jsonl(rows))
        keys.chmod(0o600)
        return keys

    async def silent(decode: ScriptedDecode, work: Any) -> None:
        pass

    folder = tmp_path / "b"
    async with gateway_api(bundled, redis_url, silent, batch_dir=folder, api_keys_file=write("1", "2")) as (
        _,
        client,
        decode,
    ):
        begun = await create(client.with_options(api_key="k-1"), [line(bundled, 1)])
        await decode.wait_for("attach", 1)
    async with gateway_api(bundled, redis_url, batch_dir=folder, api_keys_file=write("2")) as (_, client, _):
        batch = await ended(other := client.with_options(api_key="k-2"), begun)
        errors = await results(other, batch.error_file_id)
    assert batch.status == "cancelled"
    assert errors["line-1"]["error"]["code"] == "batch_cancelled"


async def test_uploads_and_the_folder_are_bounded(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"batch_dir": tmp_path, "batch_max_file_mib": 1, "batch_max_total_mib": 1}
    async with gateway_api(bundled, redis_url, **settings) as (_, client, _):
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("x", b"x"), purpose="assistants")
        with pytest.raises(openai.BadRequestError, match="at most"):
            await client.files.create(file=("big", b"x" * ((1 << 20) + 1)), purpose="batch")
        assert files_of(tmp_path) == []
        await client.files.create(file=("most", b"x" * (1 << 20)), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="no room"):
            await client.files.create(file=("more", b"x"), purpose="batch")


async def test_faults_of_a_batch_name_their_member(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    async with gateway_api(bundled, redis_url, batch_dir=tmp_path) as (stack, client, _):
        file = await client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
        good = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"}
        for change, param in (
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"input_file_id": "../../x"}, "input_file_id"),
            ({"more": 1}, "more"),
        ):
            status, answer, _ = await post(stack, "/v1/batches", {**good, **change})
            assert (status, answer["error"]["param"]) == (400, param)


async def test_gateway_without_a_folder_says_so(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        status, answer, _ = await post(stack, "/v1/batches", {})
    assert (status, answer["error"]["code"]) == (400, "unsupported_feature")
