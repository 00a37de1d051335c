"""Tool support of a model's chat template, found by rendering probes.

Many templates ignore unknown variables; the tools of a request must reach the model all the same, or be
refused. Each feature is rendered once, with names that occur nowhere else, and searched for in the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diptych.runtime.tokenizer.control_tokens import ControlToken
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.model.chat_template import ChatTemplate, Message
from gateway.model.role_support import rendered
from gateway.tools.formats import GENERIC, ToolFormat, format_of
from gateway.tools.parser import ToolCallParser
from gateway.tools.tool import Mode, Tool, Toolbox, ToolCall
from gateway.tools.unfinished import UnfinishedCalls

# Nine characters each: Mistral's templates refuse ids of any other length.
_TOOL: Final = "probetool"
_ARGUMENT: Final = "probevalu"
_RESULT: Final = "proberslt"
_ID: Final = "probe0001"

_USER: Final = Message("user", "Hello")
_PARAMETERS: Final = {"type": "object", "properties": {"x": {"type": "string"}}}
PROBE_TOOL: Final = Tool(_TOOL, "A tool.", _PARAMETERS)
_CALL: Final = Message("assistant", "", tool_calls=(ToolCall(_TOOL, f'{{"x": "{_ARGUMENT}"}}', _ID),))
_ANSWER: Final = Message("tool", _RESULT, _TOOL, tool_call_id=_ID)


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Tool features of one model."""

    tools: bool = False  # the template renders tools
    calls: bool = False  # it renders an assistant's calls
    turns: bool = False  # it renders a tool's answers
    call_format: ToolFormat | None = None  # of calls, if it is supported
    shown: frozenset[int] = frozenset()  # control tokens that spell the format's markers
    prompt_suffix: tuple[ControlToken | str, ...] = ()  # appended to the prompt where calls are required

    @classmethod
    def of(cls, template: ChatTemplate, tokenizer: Tokenizer) -> ToolSupport:
        """Probe ``template`` with two small renderings."""
        tools = _TOOL in rendered(template, [_USER], [PROBE_TOOL])
        call_format = format_of(template.tool_source) if tools else GENERIC
        markers = call_format.markers if call_format is not None else ()
        control = {token.text: token for marker in markers if (token := _control(marker, tokenizer))}
        suffix = call_format.prompt_suffix if call_format is not None else ""
        turns = rendered(template, [_USER, _CALL, _ANSWER], [PROBE_TOOL])
        return cls(
            tools=tools,
            calls=_ARGUMENT in turns,
            turns=_RESULT in turns,
            call_format=call_format,
            shown=frozenset(token.token_id for token in control.values()),
            prompt_suffix=(control.get(suffix, suffix),) if suffix else (),
        )

    @property
    def generic(self) -> bool:
        """True if tools are described in words, and calls have a form that the model learns from these."""
        return self.call_format is GENERIC

    def parser(self, tools: Toolbox | None) -> ToolCallParser | None:
        """Return a new parser of an output that may call ``tools``, or None if no call is to be parsed."""
        if tools is None or self.call_format is None or tools.mode is Mode.NONE:
            return None
        return self.call_format.parser_for(begun=tools.forced, names=[tool.name for tool in tools.callable])

    def unfinished(self, tools: Toolbox | None) -> UnfinishedCalls | None:
        """Return the reader of what is left of a call at the end of an output; None as for `parser`."""
        if tools is None or self.call_format is None or tools.mode is Mode.NONE:
            return None
        names = [tool.name for tool in tools.callable]
        return UnfinishedCalls(names, self.call_format.markers, tools.forced)


def _control(marker: str, tokenizer: Tokenizer) -> ControlToken | None:
    token_id = tokenizer.id_of(marker)
    if token_id is None or not tokenizer.is_special(token_id):
        return None
    return ControlToken(token_id, marker)
