"""Fields of the protocol that this build does not implement.

A request that sets one is refused by name: ignoring it would answer a question that nobody asked.
"""

from __future__ import annotations

from diptych.v1 import inference_pb2 as pb
from runtime.errors import UnsupportedFeature


def refuse_unsupported(request: pb.GenerateRequest) -> None:
    """Raises `UnsupportedFeature` for the first such field."""
    for field, is_set in _simple(request).items():
        if is_set:
            raise UnsupportedFeature(field)


def _simple(request: pb.GenerateRequest) -> dict[str, bool]:
    return {
        "lora": bool(request.lora),
    }
