"""A model of the Hub is downloaded by `diptych up`, and served; the next start needs no Hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.client import Client
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import running_stack
from tests.hub_server import REPO, running_hub

PROMPT = tiny_model.prompt(1, 20)


@pytest.mark.full
def test_up_downloads_a_model_once_and_serves_it_under_its_names(tmp_path: Path) -> None:
    folder = tiny_model.write(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    flags = ("--model", REPO, "--dtype", "fp32", "--kv-blocks", "128")
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": ""}
    answers = []
    with (
        running_hub(files) as hub,
        running_stack(*flags, env={**environment, "HF_ENDPOINT": hub.url}) as stack,
    ):
        for name in ("small", REPO):
            with Client(stack.address, model=name) as client:
                answers.append(client.generate(PROMPT, max_tokens=8, temperature=0.0).token_ids)
        assert set(hub.gets.values()) == {1}, "each file came once, for four processes"
    away = {**environment, "HF_ENDPOINT": "http://127.0.0.1:1"}
    with running_stack(*flags, env=away) as stack, Client(stack.address) as client:
        answers.append(client.generate(PROMPT, max_tokens=8, temperature=0.0).token_ids)
    assert len(set(answers)) == 1
