"""Systems that the clients talk to.

They serve the bundled model as it is, the same with a chat template that has tools, and a tiny random model
that reads images.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diptych.runtime.settings import BUNDLED_MODEL, resolve_model
from tests import vision_models
from tests.end_to_end.stack import http_root, running_stack

MODEL = "SmolLM2-135M-Instruct"
TOOL_TEMPLATE = Path(__file__).with_name("chatml_tools.jinja")


@dataclass(frozen=True)
class Systems:
    """The root URLs of the systems, and the gRPC address of the first."""

    root: str
    tools_root: str
    images_root: str
    grpc_address: str


def write_tool_model(folder: Path) -> Path:
    """Write the bundled weights with a chat template that has tools to `folder`; returns the GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{MODEL}-tools.gguf"
    if not file.exists():
        half = file.with_suffix(".part")
        command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force"]
        command += ["--chat-template-file", str(TOOL_TEMPLATE), str(resolve_model(BUNDLED_MODEL)), str(half)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        half.rename(file)
    return file


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Systems]:
    """Run the systems; what is written for them is kept in `folder`."""
    file = write_tool_model(folder)
    reading = vision_models.write("idefics3", folder / "images")
    encoding = ("--dtype", "fp32", "--encode-workers", "1")
    with (
        running_stack("--model-name", MODEL) as bundled,
        running_stack("--model", str(file), "--model-name", MODEL) as tools,
        running_stack("--model", str(reading), "--model-name", MODEL, *encoding) as images,
    ):
        yield Systems(http_root(bundled), http_root(tools), http_root(images), bundled.address)
