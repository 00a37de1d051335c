"""Tool support of a model's chat template, found by rendering probes.

Many templates ignore unknown variables; the tools of a request must reach the model all the same, or be
refused. Each feature is rendered once, with names that occur nowhere else, and searched for in the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from diptych.runtime.grammar.grammar import Grammar
from diptych.runtime.tokenizer.control_tokens import ControlToken
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.model.chat_template import ChatTemplate, Message
from gateway.model.role_support import rendered
from gateway.tools.call_pieces import CallPieces
from gateway.tools.formats import GENERIC, ToolFormat, format_of
from gateway.tools.json_calls import quoted
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
    control: Mapping[str, ControlToken] = field(default_factory=dict)  # markers that are control tokens

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
            control=control,
        )

    @property
    def generic(self) -> bool:
        """True if tools are described in words, and calls have a form that the model learns from these."""
        return self.call_format is GENERIC

    def grammar(self, tools: Sequence[Tool], *, many: bool, begun: bool) -> Grammar:
        """Return the grammar of an output of calls only, of one or with ``many`` of any number.

        ``begun``: the prompt ends with `prompt_suffix`, if there is one. Raises ValueError without a format.
        """
        if self.call_format is None:
            raise ValueError("the form of this model's calls is not known")
        grammar = self.call_format.grammar(tools, many=many, spell=self.spell)
        suffix = self.call_format.prompt_suffix
        if begun or not suffix:
            return grammar
        rules = grammar.text.replace("start:", "calls:", 1)
        return Grammar(grammar.kind, f"start: {self.spell(suffix)} calls\n{rules}")

    def spell(self, marker: str) -> str:
        """Return a marker as a term of a Lark grammar: its control token if it is one, else its text."""
        token = self.control.get(marker)
        return quoted(marker) if token is None else f"<[{token.token_id}]>"

    def parser(
        self, tools: Toolbox | None, *, begun: bool = True, pieces: bool = False
    ) -> ToolCallParser | None:
        """Return a new parser of an output that may call ``tools``, or None if no call is to be parsed.

        Args:
            tools: of the request.
            begun: as in `grammar`, where calls are required.
            pieces: calls come in pieces.
        """
        if tools is None or self.call_format is None or tools.mode is Mode.NONE:
            return None
        parser = self.call_format.parser_for(begun=begun and tools.forced, tools=tools.callable)
        if not pieces:
            return parser
        begin = self.call_format.begin(tools.callable)
        return CallPieces(parser, begin, rewritten=self.call_format.rewritten)

    def unfinished(self, tools: Toolbox | None) -> UnfinishedCalls | None:
        """Return the reader of what is left of a call at the end of an output; None as for `parser`."""
        if tools is None or self.call_format is None or tools.mode is Mode.NONE:
            return None
        begin = self.call_format.begin(tools.callable)
        return UnfinishedCalls(begin, self.call_format.markers, tools.forced)


def _control(marker: str, tokenizer: Tokenizer) -> ControlToken | None:
    token_id = tokenizer.id_of(marker)
    if token_id is None or not tokenizer.is_special(token_id):
        return None
    return ControlToken(token_id, marker)
