"""The forms in which models write calls, and which of them a chat template speaks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from diptych.runtime.grammar.grammar import Grammar
from gateway.tools import hermes, llama3_json, mistral
from gateway.tools.parser import ToolCallParser
from gateway.tools.tool import Tool


class WritesGrammar(Protocol):
    """The grammar of an output that is nothing but calls."""

    def __call__(self, tools: Sequence[Tool], *, many: bool) -> Grammar: ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One form. A new one is a file with a parser and a grammar, and a line in `FORMATS`."""

    name: str
    signs: tuple[str, ...]
    """A chat template with one of these in its source speaks this form."""
    markers: tuple[str, ...]
    """Text that the parser looks for; where a control token spells it, the token's text is not left out."""
    parser: Callable[[Collection[str] | None], ToolCallParser]
    """Made with the tools' names, if they are known."""
    grammar: WritesGrammar
    foreign_signs: tuple[str, ...] = ()
    """One that has one of these as well speaks another, which begins alike and is not known here."""
    prompt_suffix: str = ""
    """What begins calls: put at the end of the prompt where calls are required."""
    begun_parser: Callable[[], ToolCallParser] | None = None
    """Reads an output whose beginning is in the prompt."""

    def parser_for(self, *, begun: bool, names: Collection[str] | None = None) -> ToolCallParser:
        """A fresh parser.

        Args:
            begun: `prompt_suffix`, if there is one, is at the end of the prompt.
            names: of the tools; some forms cannot tell calls from other JSON without them.
        """
        if begun and self.begun_parser is not None:
            return self.begun_parser()
        return self.parser(names)


# The first whose signs are found is meant: more particular ones come first.
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


def format_of(template: str) -> ToolFormat | None:
    """The form that a chat template asks its model for, if it is known here."""
    form = next((form for form in FORMATS if any(sign in template for sign in form.signs)), None)
    return None if form is None or any(sign in template for sign in form.foreign_signs) else form
