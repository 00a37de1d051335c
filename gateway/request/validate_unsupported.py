"""Fields of the protocol that this build does not implement, alone or beside others.

A request that sets one is refused by name: ignoring it would answer a question that nobody asked.
"""

from __future__ import annotations

from diptych.runtime.errors import UnsupportedFeature
from diptych.v1 import inference_pb2 as pb


def refuse_unsupported(request: pb.GenerateRequest) -> None:
    """Raises `UnsupportedFeature` for the first such field."""
    if request.lora:
        raise UnsupportedFeature("lora")
    # The workers search over token ids. Cut at a string afterwards, several beams would be the same text,
    # ranked by what nobody sees of them.
    if request.stopping.stop and request.sampling.beam_width > 1:
        raise UnsupportedFeature("stopping.stop", "is not supported with beam search; stop_token_ids are")
