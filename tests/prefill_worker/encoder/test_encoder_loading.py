"""Loading of an encode worker's model by its name at the Hub, in a process that reads the Hub's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import vision_models
from tests.hub_server import REPO, running_hub

PROGRAM = """
import asyncio, sys
from prefill_worker.encoder.config import EncodeSettings
from prefill_worker.encoder.engine import load
settings = EncodeSettings.from_argv(["--model", sys.argv[1], "--dtype", "fp32", "--threads", "1"])
print(asyncio.run(load(settings)).record.image_rows)
"""


def test_encode_worker_downloads_a_model_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    vision_models.write("idefics3", folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with running_hub(files) as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "",
        }
        command = [sys.executable, "-c", PROGRAM, REPO]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
    assert done.stdout.strip() == "idefics3/float32"
