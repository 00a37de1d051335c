"""Every example as its reader runs it, against a real system with a small model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.stack import Stack

EXAMPLES = Path(__file__).parents[3] / "examples"
# What each must have printed: the model knows nothing, so it is about the form.
SHOWN = {
    "ask": ["model: tiny", "whole:", "finished:", "refused: INVALID_ARGUMENT INVALID_PARAMETER", "sampling."],
    "ask_async": ["Japan:", "left after:", "was running: True", "ended as: cancelled", "no such one: False"],
    "chat_loop": ["[0 tokens of the prompt were known]", "tokens of the prompt were known]"],
    "structured_output": ["schema:", "choice:", "regex: ", "grammar: "],
    "several_answers": ["3: ", "order of the pieces: [0, 1", "the likeliest of four:", "beams: ["],
    "logprobs": ["rank 1 ", "the prompt of "],
    "tools": ["finished: tool_calls", "call: get_weather {'city': '", "answer:"],
    "plain_stubs": ["model: tiny", "tokens: ", "request id: ", "field: sampling.top_p"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_it_runs_and_shows_what_it_is_for(stack: Stack, name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"{EXAMPLES / name}.py", stack.address],
        input="Hello\nAnd again?\n\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    for expected in SHOWN[name]:
        assert expected in done.stdout
    assert done.stderr == ""


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWN)
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}.py`" in readme for name in SHOWN)
