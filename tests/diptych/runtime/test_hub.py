"""Models of the Hub, from a real HTTP server that speaks its endpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.runtime.hub import HubModel
from tests.hub_server import REPO, Hub, running_hub

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 4096,
    "tokenizer.json": b"{}",
    "onnx/model.json": b"of no use here",
    "pytorch_model.bin": b"neither",
}
LARGE = "model.safetensors"
PROGRAM = """
import sys
from diptych.runtime.hub import HubError, HubModel, cached_model, download_model
model = HubModel.parse(sys.argv[2])
try:
    print(download_model(model) if sys.argv[1] == "download" else cached_model(model))
except HubError as error:
    print("refused:", error)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub(FILES) as server:
        yield server


def run(url: str, cache: Path, what: str, model: str = REPO) -> str:
    """Return what the program prints, in a process that reads the Hub's variables."""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", PROGRAM, what, model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_model_is_downloaded_goes_on_after_a_failure_and_is_found_without_the_hub(
    hub: Hub, tmp_path: Path
) -> None:
    hub.fails = {LARGE}
    assert run(hub.url, tmp_path, "download").startswith(
        f"refused: {REPO} cannot be downloaded from {hub.url}"
    )
    assert run(hub.url, tmp_path, "cached") == "None"
    hub.fails = set()
    folder = Path(run(hub.url, tmp_path, "download"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", LARGE, "tokenizer.json")
    }
    assert hub.gets["config.json"] == 1, "it was there already"
    asked = hub.gets.total()
    assert run("http://127.0.0.1:1", tmp_path, "download") == str(folder)
    assert hub.gets.total() == asked


def test_file_that_came_damaged_is_refused_and_comes_anew(hub: Hub, tmp_path: Path) -> None:
    hub.damages = {LARGE}
    assert run(hub.url, tmp_path, "download").startswith(f"refused: {LARGE} of {REPO} came damaged")
    hub.damages = set()
    assert (Path(run(hub.url, tmp_path, "download")) / LARGE).read_bytes() == FILES[LARGE]


@pytest.mark.parametrize(
    ("model", "parsed"),
    [
        ("org/name", HubModel("org/name", None, "")),
        ("org/name@v1.0", HubModel("org/name", "v1.0", "")),
        ("org/name/sub/x-Q4_0.gguf", HubModel("org/name", None, "sub/x-Q4_0.gguf")),
        ("name", None),
        ("bundled", None),
        ("org/x.gguf", None),
        ("/org/name", None),
        ("here/name", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(
    model: str, parsed: HubModel | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert HubModel.parse(model) == parsed
