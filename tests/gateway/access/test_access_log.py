"""The access log of a real gateway: every call once, who it was, and the tokens that the counters have."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.v1 import admin_pb2, admin_pb2_grpc
from gateway.access import access_log
from gateway.access.access_log import AccessLog, line_of
from gateway.access.call_record import CallRecord, CallUsage
from gateway.access.key_file import Scope
from gateway.model.served_model import ServedModel
from tests.gateway.access.keys import Keys, bearer
from tests.gateway.access.locked_gateway import OUTPUT, completion, failure, http
from tests.gateway.running_gateway import collect, running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENTINEL = "xyzzyplugh"
RECORD = CallRecord(
    Scope.INFERENCE, "POST /v1/completions", "r", "acme", "acme-0", "OK", None, 200, 0.0123, TRACE
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_every_call_has_a_line_and_tokens_add_up_to_the_counters(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    keys, path = Keys(tmp_path / "keys.jsonl"), tmp_path / "access.jsonl"
    acme, other, operator = keys.add("acme"), keys.add("other"), keys.add("ops", "admin")
    decode = ScriptedDecode(answering(OUTPUT))
    settings: dict[str, Any] = {"api_keys_file": keys.path, "access_log": str(path)}
    async with running(bundled, redis_url, ScriptedPrefill(), decode, **settings) as stack:
        for _ in range(2):
            await stack.stub.Generate(stack.request(), metadata=bearer(acme))
        parent = f"00-{TRACE}-00f067aa0ba902b7-01"
        traced = (*bearer(other), ("traceparent", parent), ("x-request-id", "mine"))
        await collect(stack.stub.StreamGenerate(stack.request(), metadata=traced))
        several = completion(stack, prompt=[f"{SENTINEL} one", f"{SENTINEL} two"])
        assert (await http(stack, "/v1/completions", acme, several))[0] == 200
        assert (await http(stack, "/v1/completions", acme, completion(stack, temperature=-1)))[0] == 400
        await failure(stack.stub.Generate(stack.request(), metadata=bearer("dk-unknown")))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.admin_port}") as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            await failure(
                admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="none"), metadata=bearer(operator))
            )
        await stack.until_idle()
        counted = {
            (sample.labels["tenant"], sample.labels["kind"]): sample.value
            for family in stack.gateway.registry.collect()
            for sample in family.samples
            if sample.name == "diptych_tenant_tokens_total"
        }
        totals = stack.gateway.metrics
        in_all = totals.input_tokens._value.get(), totals.output_tokens._value.get()
    found = lines_of(path)
    assert SENTINEL not in path.read_text()
    assert [line["status"] for line in found] == [
        *("OK", "OK", "OK", "OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "NOT_FOUND")
    ]
    assert [line["tenant"] for line in found] == [*("acme", "acme", "other", "acme", "acme", None, "ops")]
    logged: dict[tuple[str, str], float] = defaultdict(float)
    for line in found:
        for kind in ("input", "cached", "output"):
            if line["kind"] == "inference" and line["tenant"]:
                logged[line["tenant"], kind] += line[f"{kind}_tokens"]
    assert logged == counted
    by_kind = {k: sum(n for (_, kind), n in counted.items() if kind == k) for k in ("input", "output")}
    assert in_all == (by_kind["input"], by_kind["output"])
    assert counted["acme", "output"] == 4 * len(OUTPUT)  # two prompts of the list among them
    streamed, refused, drained = found[2], found[4], found[6]
    assert (streamed["trace_id"], streamed["key"]) == (TRACE, "other-1")
    assert streamed["request_id"].startswith("mine")
    assert streamed["model"] == bundled.card.name
    assert (refused["http_status"], refused["reason"]) == (400, "INVALID_PARAMETER")
    assert (drained["kind"], drained["key"], drained["target"]) == ("admin", "ops-2", "none")
    assert drained["method"] == "diptych.v1.AdminService/DrainWorker"


def test_line_is_one_line_whatever_a_client_sent() -> None:
    usage = CallUsage("m", 3, 2, 1)
    hostile = CallRecord(
        **{field: getattr(RECORD, field) for field in ("scope", "method", "tenant", "key", "status")},
        **{field: getattr(RECORD, field) for field in ("reason", "http_status", "duration_s", "trace_id")},
        request_id='a"\n{"tenant": "x"}\u2028',
        usage=usage,
    )
    text = line_of(hostile, "g", datetime.datetime(2026, 11, 27, tzinfo=datetime.UTC))
    assert text.count("\n") == 1
    assert text.isascii()
    members = json.loads(text)
    assert members["request_id"] == hostile.request_id
    assert members["time"] == "2026-11-27T00:00:00.000Z"
    assert (members["input_tokens"], members["cached_tokens"], members["output_tokens"]) == (3, 2, 1)


def test_a_rotated_file_is_left_for_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_LOOK_EVERY_S", 0.0)
    path = tmp_path / "log"
    log = AccessLog(str(path), "g", lambda: pytest.fail("dropped"))
    log.write(RECORD)
    until = time.monotonic() + 20
    while not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.rename(path, tmp_path / "log.1")
    log.write(RECORD)
    log.close()
    assert len(lines_of(path)) == len(lines_of(tmp_path / "log.1")) == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_loses_lines_and_delays_nothing() -> None:
    lost: list[None] = []
    log = AccessLog("/dev/full", "g", lambda: lost.append(None))
    for _ in range(100):
        log.write(RECORD)
    log.close()
    assert len(lost) == 100
