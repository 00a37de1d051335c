"""Formats of tool calls, and the choice of a model's format by its chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from diptych.runtime.grammar.grammar import Grammar
from gateway.tools import (
    deepseek,
    generic_json,
    glm45,
    harmony,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    mistral_args,
    qwen3_coder,
)
from gateway.tools.headed_calls import HeadedCallParser, HeadedForm, begun_headed_call
from gateway.tools.json_calls import Begin, Spell, begun_call
from gateway.tools.parser import ToolCallParser
from gateway.tools.tool import Tool
from gateway.tools.written_arguments import WrittenArguments


class CallGrammar(Protocol):
    """Maker of the grammar of an output of calls only.

    ``many``: any number of calls, else one. ``spell`` makes the term of a marker.
    """

    def __call__(self, tools: Sequence[Tool], *, many: bool, spell: Spell = ...) -> Grammar: ...


def _names(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.name for tool in tools)


def _begin_json(tools: Sequence[Tool]) -> Begin:
    return partial(begun_call, names=_names(tools))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of tool calls. A new one is a file with a parser and a grammar, and an entry in `FORMATS`."""

    name: str
    signs: tuple[str, ...]
    """A chat template with one of these in its source uses this format."""
    markers: tuple[str, ...]
    """Text that the parser searches for; the text of a control token that spells one is kept."""
    parser: Callable[[Sequence[Tool] | None], ToolCallParser]
    """Called with the tools that may be called, or None if they are unknown."""
    grammar: CallGrammar
    foreign_signs: tuple[str, ...] = ()
    """A chat template that also has one of these uses another format."""
    prompt_suffix: str = ""
    """Text that begins calls: appended to the prompt where calls are required."""
    optional_grammar: Callable[[Sequence[Tool]], Grammar] | None = None
    """Grammar of an output that may be a call or text, where the model does not know the format."""
    begun_parser: Callable[[], ToolCallParser] | None = None
    """Parser of an output whose beginning is in the prompt."""
    begin: Callable[[Sequence[Tool]], Begin] = _begin_json
    """Maker of the reader of a call's beginning."""
    rewritten: bool = False
    """Arguments are JSON that is made of what the model writes."""

    def parser_for(self, *, begun: bool, tools: Sequence[Tool] | None = None) -> ToolCallParser:
        """Return a new parser.

        Args:
            begun: the prompt ends with `prompt_suffix`, if there is one.
            tools: that may be called; some formats need their names to tell calls from other JSON, or the
                types of their arguments.
        """
        if begun and self.begun_parser is not None:
            return self.begun_parser()
        return self.parser(tools)


def _headed(form: HeadedForm) -> Callable[[Sequence[Tool]], Begin]:
    return lambda tools: partial(begun_headed_call, names=_names(tools), form=form)


def _llama3_parser(tools: Sequence[Tool] | None) -> ToolCallParser:
    return llama3_json.Llama3JsonParser(None if tools is None else _names(tools))


# The first format whose signs are found, and none of its foreign ones, applies.
FORMATS: Final = (
    ToolFormat(
        "hermes",
        (hermes.OPEN,),
        hermes.MARKERS,
        lambda _: hermes.HermesParser(),
        hermes.grammar,
        foreign_signs=(qwen3_coder.SIGN, glm45.SIGN),  # no JSON between the tags
    ),
    ToolFormat(
        "mistral",
        (mistral.MARK,),
        mistral.MARKERS,
        lambda _: mistral.MistralParser(),
        mistral.grammar,
        foreign_signs=(mistral_args.ARGS,),  # no list, but names and arguments
        prompt_suffix=mistral.MARK,
        begun_parser=partial(mistral.MistralParser, begun=True),
    ),
    ToolFormat(
        "mistral_args",
        (mistral_args.ARGS,),
        mistral_args.MARKERS,
        lambda _: HeadedCallParser(mistral_args.FORM),
        mistral_args.grammar,
        prompt_suffix=mistral.MARK,
        begun_parser=partial(HeadedCallParser, mistral_args.FORM, begun=True),
        begin=_headed(mistral_args.FORM),
    ),
    ToolFormat(
        "qwen3_coder",
        (qwen3_coder.SIGN,),
        qwen3_coder.MARKERS,
        qwen3_coder.parser,
        qwen3_coder.grammar,
        begin=lambda tools: partial(
            qwen3_coder.begun_call, names=_names(tools), arguments=WrittenArguments(tools)
        ),
        rewritten=True,
    ),
    ToolFormat(
        "glm45",
        (glm45.SIGN,),
        glm45.MARKERS,
        glm45.parser,
        glm45.grammar,
        begin=lambda tools: partial(glm45.begun_call, names=_names(tools), arguments=WrittenArguments(tools)),
        rewritten=True,
    ),
    ToolFormat(
        "deepseek_v31",
        (deepseek.LIST,),
        deepseek.MARKERS,
        lambda _: HeadedCallParser(deepseek.FORM),
        deepseek.grammar,
        foreign_signs=(deepseek.FENCE,),
        begin=_headed(deepseek.FORM),
    ),
    ToolFormat(
        "deepseek_v3",
        (deepseek.LIST,),
        deepseek.MARKERS,
        lambda _: HeadedCallParser(deepseek.FORM),
        deepseek.fenced_grammar,
        begin=_headed(deepseek.FORM),
    ),
    ToolFormat(
        "kimi_k2",
        (kimi_k2.SECTION, kimi_k2.SIGN),
        kimi_k2.MARKERS,
        lambda _: HeadedCallParser(kimi_k2.FORM),
        kimi_k2.grammar,
        begin=_headed(kimi_k2.FORM),
    ),
    ToolFormat(
        "harmony",
        (harmony.SIGN,),
        harmony.MARKERS,
        lambda _: harmony.HarmonyCallParser(),
        harmony.grammar,
        begin=lambda tools: partial(harmony.begun_call, names=_names(tools)),
    ),
    ToolFormat(
        "llama3_json",
        (llama3_json.TAG, '"parameters":', "Environment: ipython"),
        llama3_json.MARKERS,
        _llama3_parser,
        llama3_json.grammar,
    ),
)

GENERIC: Final = ToolFormat(
    "generic_json",
    (),
    (),
    _llama3_parser,
    generic_json.grammar,
    optional_grammar=generic_json.optional_grammar,
)
"""Format of models whose chat template has no tools: the tools are described in the system turn."""


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks its model for, or None if it is not supported."""
    return next((one for one in FORMATS if _speaks(one, template)), None)


def _speaks(one: ToolFormat, template: str) -> bool:
    return any(sign in template for sign in one.signs) and not any(
        sign in template for sign in one.foreign_signs
    )
