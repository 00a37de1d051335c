"""A batch through real processes: its gateway is killed in the middle, and every line has one result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych.cli.run_batch import BadInput, read_lines
from tests.end_to_end import tiny_system
from tests.end_to_end.stack import Stack, http_root, running_stack
from tests.end_to_end.tiny_system import MODEL, Served

CHATS = "/v1/chat/completions"
LINES = [pytest.param(80, id="80"), pytest.param(1000, id="1000", marks=pytest.mark.full)]
TIMEOUT_S = 240.0


def lines(count: int) -> bytes:
    """Return greedy requests, each with a question of its own."""
    body = {"model": MODEL, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": CHATS,
                "body": {**body, "messages": [{"role": "user", "content": f"Question {number}"}]},
            }
        ).encode()
        + b"\n"
        for number in range(count)
    )


def client_of(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http_root(stack)}/v1", api_key="any", max_retries=8, timeout=60)


def texts(results: str) -> dict[str, str]:
    """Return the answers by the ids of their lines, each of which occurs once."""
    found = [json.loads(text) for text in results.splitlines()]
    assert all(one["response"]["status_code"] == 200 for one in found), found[:3]
    answers = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in found}
    assert len(answers) == len(found)
    return answers


@pytest.mark.parametrize("count", LINES)
def test_every_line_has_one_result_though_its_gateway_is_killed(tmp_path: Path, count: int) -> None:
    folder = tiny_system.write(tmp_path / "model")
    flags = [
        "--model",
        str(folder),
        "--model-name",
        MODEL,
        "--dtype",
        "fp32",
        "--batch-dir",
        str(tmp_path / "b"),
    ]
    with running_stack(*flags, "--set", "gateway.batch-concurrency=4") as stack:
        client = client_of(stack)
        file = client.files.create(file=("in.jsonl", lines(count)), purpose="batch")
        begun = client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
        kill_gateway_after(stack, tmp_path / "b", count // 4)
        batch = wait_for_end(stack, begun.id)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        answers = texts(client_of(stack).files.content(batch.output_file_id or "").text)
        assert answers.keys() == {f"line-{number}" for number in range(count)}
        asked = json.loads(lines(count).splitlines()[3])["body"]
        del asked["ignore_eos"]
        again = client_of(stack).chat.completions.create(**asked, extra_body={"ignore_eos": True})
        assert answers["line-3"] == again.choices[0].message.content
        stack.wait_idle()


def kill_gateway_after(stack: Stack, folder: Path, results: int) -> None:
    """Kill the gateway once the batch has so many results."""
    deadline = time.monotonic() + TIMEOUT_S
    while sum(len(path.read_bytes().splitlines()) for path in folder.rglob("output.jsonl")) < results:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(stack.account["gateway"]["pid"], signal.SIGKILL)
    (path,) = folder.rglob("output.jsonl")
    assert len(path.read_bytes().splitlines()) < results * 4, "it was done before it was killed"


def wait_for_end(stack: Stack, batch_id: str) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        assert time.monotonic() < deadline
        try:
            batch = client_of(stack).batches.retrieve(batch_id)
        except (openai.APIConnectionError, KeyError):
            continue  # the next gateway is not there yet
        if batch.status not in ("validating", "in_progress", "finalizing"):
            return batch
        time.sleep(0.2)


def test_run_batch_completes_what_an_earlier_run_left(served: Served, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(12))
    command = [sys.executable, "-m", "diptych", "run-batch", "-i", str(source), "-o", str(target)]
    command += ["--url", http_root(served.stack), "--concurrency", "4"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    first = texts(target.read_text())
    assert first.keys() == {f"line-{number}" for number in range(12)}
    kept = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(kept[:5]) + kept[5][:20])
    again = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "7 lines are left" in again.stderr
    assert target.read_bytes().startswith(b"".join(kept[:5]))
    assert texts(target.read_text()) == first


def test_bad_input_is_named_by_file_and_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    for data, fault in (
        (lines(1) + b'{"custom_id": "a"}\n', "in.jsonl:2: method must be POST"),
        (lines(1) * 2, "in.jsonl:2: custom_id is that of an earlier line"),
    ):
        source.write_bytes(data)
        with pytest.raises(BadInput, match=fault):
            read_lines(source)
