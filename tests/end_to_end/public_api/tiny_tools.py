"""A small model whose chat template has tools, and systems that serve it, for tests that send everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack

MODEL = "tiny"
TEMPLATE = Path(tiny_model.__file__).with_name("tool_template.jinja")


def write(folder: Path) -> Path:
    tiny_model.write(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return folder


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Stack]:
    """Idle at the end, or it fails."""
    given = ["--model", str(folder), "--model-name", MODEL, "--dtype", "fp32"]
    with running_stack(*given, *flags) as stack:
        yield stack
        stack.wait_idle()
