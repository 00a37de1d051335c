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
    constraint = request.structured_output.WhichOneof("constraint")
    if request.HasField("structured_output"):
        raise UnsupportedFeature(f"structured_output.{constraint}" if constraint else "structured_output")


def refuse_unsupported_chat(chat: pb.ChatPrompt) -> None:
    """Tools and tool turns, in prompts of any request."""
    if chat.tools:
        raise UnsupportedFeature("chat.tools")
    for index, message in enumerate(chat.messages):
        if message.tool_calls:
            raise UnsupportedFeature(f"chat.messages[{index}].tool_calls")
        if message.tool_call_id:
            raise UnsupportedFeature(f"chat.messages[{index}].tool_call_id")


def _simple(request: pb.GenerateRequest) -> dict[str, bool]:
    return {
        "lora": bool(request.lora),
        "resume_token": bool(request.resume_token),
        "received_token_ids": bool(request.received_token_ids),
    }
