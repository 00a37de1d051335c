"""``tool_choice`` and ``parallel_tool_calls`` of a body → ``pb.ToolChoice``."""

from __future__ import annotations

from typing import Final

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import inference_pb2 as pb

_MODES: Final = {
    "none": pb.ToolChoice.MODE_NONE,
    "auto": pb.ToolChoice.MODE_AUTO,
    "required": pb.ToolChoice.MODE_REQUIRED,
}


def put_tool_choice(chat: pb.ChatPrompt, mode: str | None, name: str | None, parallel: bool | None) -> None:
    """Set which of the chat's tools, set before, may be called.

    Args:
        chat: prompt that is read.
        mode: word of the body, if it has one.
        name: function that must be called, if the body names one; there is no word then.
        parallel: whether several calls may be made at once.

    Raises InvalidParameter for an unknown word.
    """
    choice = chat.tool_choice
    if name is not None:
        choice.mode, choice.name = pb.ToolChoice.MODE_NAMED, name
    elif mode is not None and mode not in _MODES:
        raise InvalidParameter("tool_choice", f"must be {', '.join(_MODES)} or name a function")
    elif mode is not None and (mode != "auto" or chat.tools):
        choice.mode = _MODES[mode]
    if parallel is False and chat.tools:
        choice.parallel = False
