"""Requests that are small enough for another model: opt-in, by name and size of the prompt. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.v1 import inference_pb2 as pb
from gateway.model.name_rule import NAME_RULE, valid_name

MAX_BYTES: Final = 1 << 30
_ID_BYTES: Final = 4  # of a token, on average


@dataclass(frozen=True, slots=True)
class SmallRequests:
    """Requests for ``name`` whose prompt has at most ``most_bytes``, which ``model`` answers."""

    name: str
    model: str
    most_bytes: int


def parse_small_requests(text: str) -> tuple[SmallRequests, ...]:
    """Return the rules of ``--small-requests``: NAME=MODEL:BYTES for each, separated by commas.

    Raises ValueError.
    """
    found: dict[str, SmallRequests] = {}
    for item in filter(None, text.split(",")):
        name, equals, target = item.partition("=")
        model, colon, most = target.rpartition(":")
        if not (equals and colon and most.isascii() and most.isdecimal() and len(most) < 12):
            raise ValueError(f"{item!r} is not NAME=MODEL:BYTES")
        for one in (name, model):
            if not valid_name(one):
                raise ValueError(f"the name {one!r} {NAME_RULE}")
        if name == model or name in found:
            raise ValueError(f"the name {name!r} stands for itself, or is given twice")
        if not 0 < int(most) <= MAX_BYTES:
            raise ValueError(f"the bytes of {name!r} must be from 1 to {MAX_BYTES}")
        found[name] = SmallRequests(name, model, int(most))
    return tuple(found.values())


def prompt_bytes(request: pb.GenerateRequest) -> int:
    """Return the size of a request's prompt: text, conversation with tools and images, or ids."""
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        return request.chat.ByteSize()
    return len(request.text.encode()) if kind == "text" else _ID_BYTES * len(request.token_ids.ids)
