"""Formats of tool calls, and the choice of a model's format by its chat template."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from diptych.runtime.grammar.grammar import Grammar
from gateway.tools import generic_json, hermes, llama3_json, mistral
from gateway.tools.json_calls import Spell
from gateway.tools.parser import ToolCallParser
from gateway.tools.tool import Tool


class CallGrammar(Protocol):
    """Maker of the grammar of an output of calls only.

    ``many``: any number of calls, else one. ``spell`` makes the term of a marker.
    """

    def __call__(self, tools: Sequence[Tool], *, many: bool, spell: Spell = ...) -> Grammar: ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of tool calls. A new one is a file with a parser and a grammar, and an entry in `FORMATS`."""

    name: str
    signs: tuple[str, ...]
    """A chat template with one of these in its source uses this format."""
    markers: tuple[str, ...]
    """Text that the parser searches for; the text of a control token that spells one is kept."""
    parser: Callable[[Collection[str] | None], ToolCallParser]
    """Called with the tools' names, or None if they are unknown."""
    grammar: CallGrammar
    foreign_signs: tuple[str, ...] = ()
    """A chat template that also has one of these uses a similar format that is not supported."""
    prompt_suffix: str = ""
    """Text that begins calls: appended to the prompt where calls are required."""
    optional_grammar: Callable[[Sequence[Tool]], Grammar] | None = None
    """Grammar of an output that may be a call or text, where the model does not know the format."""
    begun_parser: Callable[[], ToolCallParser] | None = None
    """Parser of an output whose beginning is in the prompt."""

    def parser_for(self, *, begun: bool, names: Collection[str] | None = None) -> ToolCallParser:
        """Return a new parser.

        Args:
            begun: the prompt ends with `prompt_suffix`, if there is one.
            names: of the tools; some formats need them to tell calls from other JSON.
        """
        if begun and self.begun_parser is not None:
            return self.begun_parser()
        return self.parser(names)


# The first format whose signs are found applies: more specific ones come first.
FORMATS: Final = (
    ToolFormat(
        "hermes",
        (hermes.OPEN,),
        hermes.MARKERS,
        lambda _: hermes.HermesParser(),
        hermes.grammar,
        foreign_signs=("<function=", "<arg_key>"),  # Qwen3-Coder, GLM 4.5: no JSON between the tags
    ),
    ToolFormat(
        "mistral",
        (mistral.MARK,),
        mistral.MARKERS,
        lambda _: mistral.MistralParser(),
        mistral.grammar,
        foreign_signs=("[ARGS]",),  # Small 3.2 and later: no list, but names and arguments
        prompt_suffix=mistral.MARK,
        begun_parser=partial(mistral.MistralParser, begun=True),
    ),
    ToolFormat(
        "llama3_json",
        (llama3_json.TAG, '"parameters":', "Environment: ipython"),
        llama3_json.MARKERS,
        llama3_json.Llama3JsonParser,
        llama3_json.grammar,
    ),
)

GENERIC: Final = ToolFormat(
    "generic_json",
    (),
    (),
    llama3_json.Llama3JsonParser,
    generic_json.grammar,
    optional_grammar=generic_json.optional_grammar,
)
"""Format of models whose chat template has no tools: the tools are described in the system turn."""


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks its model for, or None if it is not supported."""
    found = next((one for one in FORMATS if any(sign in template for sign in one.signs)), None)
    return None if found is None or any(sign in template for sign in found.foreign_signs) else found
