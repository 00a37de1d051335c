"""NVIDIA's tritonclient against the whole system, with the bundled model.

The client wants an older protobuf than the product, so it lives in a virtual environment of its own, which
`make clients` makes; a script there asks, and what it got is judged here.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from diptych.client import Client
from tests.end_to_end.stack import Stack

SCRIPT = Path(__file__).with_name("triton_client_script.py")
INTERPRETER = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not INTERPRETER.exists() and not os.environ.get("DIPTYCH_REQUIRE_CLIENTS"),
    reason="`make clients` makes the virtual environment with tritonclient",
)


@pytest.fixture(scope="module")
def stack(bundled: Stack) -> Stack:
    return bundled


@pytest.fixture(scope="module")
def seen(stack: Stack) -> dict[str, Any]:
    """What the script got. Fails where the client raised, and where a cancelled request stays."""
    command = [str(INTERPRETER), str(SCRIPT), stack.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    stack.wait_idle()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, tuple[str, list[int]]]:
    """Return the answers over gRPC to the same prompts."""
    found = {}
    with Client(stack.address) as client:
        for name, prompt in (("a", "The capital of France is"), ("b", "One, two, three,")):
            answer = client.generate(prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
            found[name] = (answer.text, list(answer.token_ids))
    return found


def joined(pieces: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """And only the last piece says that it is the last, why, and how much there was."""
    assert [piece["final"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [piece["finish_reason"] for piece in pieces] == [[""]] * (len(pieces) - 1) + [["length"]]
    assert pieces[-1]["completion_tokens"] == 12
    assert len(pieces) > 3
    return "".join(piece["text"] for piece in pieces), [i for piece in pieces for i in piece["token_ids"]]


def test_metadata_describes_server_and_model(seen: dict[str, Any]) -> None:
    assert seen["about"] == {
        "live": True,
        "ready": True,
        "model_ready": True,
        "server": "diptych",
        "inputs": ["text_input", "token_ids", "sampling_parameters"],
        "outputs": ["text_output", "token_ids", "finish_reason"],
    }


def test_whole_answers_equal_those_of_grpc(
    seen: dict[str, Any], expected: dict[str, tuple[str, list[int]]]
) -> None:
    whole = seen["whole"]
    for name in ("by_text", "by_json"):
        assert (whole[name]["text"], whole[name]["token_ids"]) == expected["a"]
        assert whole[name]["finish_reason"] == ["length"]
        assert whole[name]["completion_tokens"] == 12
    assert whole["by_text"]["id"] == "whole"
    assert whole["by_ids"]["completion_tokens"] == len(whole["by_ids"]["token_ids"]) == 12


def test_streams_side_by_side_are_too(
    seen: dict[str, Any], expected: dict[str, tuple[str, list[int]]]
) -> None:
    assert {name: joined(pieces) for name, pieces in seen["streamed"]["pieces"].items()} == expected
    assert joined(seen["aio"]) == expected["a"]


def test_errors_name_what_is_wrong(seen: dict[str, Any]) -> None:
    (error,) = seen["streamed"]["errors"]
    assert error.startswith("INVALID_ARGUMENT INVALID_PARAMETER: parameters[top_p]: ")
    refused = seen["refused"]
    assert refused["parameter"].startswith("StatusCode.INVALID_ARGUMENT parameters[top_p]: ")
    assert refused["model"].startswith("StatusCode.NOT_FOUND ")
    assert refused["timeout"].startswith("StatusCode.DEADLINE_EXCEEDED ")


def test_a_cancelled_stream_leaves_nothing_behind(seen: dict[str, Any], stack: Stack) -> None:
    assert seen["cancelled"] == 4
    stack.wait_idle()
