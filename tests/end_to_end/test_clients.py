"""The runner of real clients, with the one client that needs no environment of its own."""

from __future__ import annotations

from pathlib import Path

from tests import vision_models
from tests.clients.__main__ import run_client
from tests.clients.clients import CLIENTS
from tests.clients.results import OK, PATHS
from tests.clients.systems import MODEL, Systems
from tests.end_to_end.stack import Stack, http_root, running_stack


def test_openai_python_fails_on_no_path(bundled: Stack, tmp_path: Path) -> None:
    reading, root = vision_models.write("idefics3", tmp_path / "images"), http_root(bundled)
    with running_stack("--model", str(reading), "--model-name", MODEL, "--dtype", "fp32") as images:
        systems = Systems(root, root, http_root(images), bundled.address)
        found = run_client(CLIENTS["openai-python"], systems, 240)
    assert {one.path: one.result for one in found.results} == dict.fromkeys(PATHS, OK), found.results
