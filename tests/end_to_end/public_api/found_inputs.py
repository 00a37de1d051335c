"""Inputs that coverage-guided fuzzing found worth keeping, and where each is sent."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final, NamedTuple

KEPT: Final = 60
"""Of each door."""
FILE: Final = Path(__file__).with_name("found_inputs.txt")


class Door(NamedTuple):
    """One way in."""

    kind: str
    """grpc or http."""
    path: str


GENERATE: Final = Door("grpc", "/diptych.v1.InferenceService/Generate")
COMPLETIONS: Final = Door("http", "/v1/completions")
CHAT: Final = Door("http", "/v1/chat/completions")
INFER: Final = Door("grpc", "/inference.GRPCInferenceService/ModelInfer")
_DOORS: Final = {door.path: door for door in (GENERATE, COMPLETIONS, CHAT, INFER)}


def found_inputs() -> list[tuple[Door, bytes]]:
    """All of them: the door and what is sent through it."""
    lines = [line.partition(" ") for line in FILE.read_text().splitlines()]
    return [(_DOORS[path], base64.b64decode(data)) for path, _, data in lines]
