"""Inputs that coverage-guided fuzzing found worth keeping, and where each is sent."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final, NamedTuple

KEPT: Final = 60
"""Of each API."""
FILE: Final = Path(__file__).with_name("found_inputs.txt")


class Api(NamedTuple):
    """One way in."""

    kind: str
    """grpc or http."""
    path: str


GENERATE: Final = Api("grpc", "/diptych.v1.InferenceService/Generate")
COMPLETIONS: Final = Api("http", "/v1/completions")
CHAT: Final = Api("http", "/v1/chat/completions")
INFER: Final = Api("grpc", "/inference.GRPCInferenceService/ModelInfer")
_DOORS: Final = {api.path: api for api in (GENERATE, COMPLETIONS, CHAT, INFER)}


def found_inputs() -> list[tuple[Api, bytes]]:
    """Return all of them: the API and what is sent to it."""
    lines = [line.partition(" ") for line in FILE.read_text().splitlines()]
    return [(_DOORS[path], base64.b64decode(data)) for path, _, data in lines]
