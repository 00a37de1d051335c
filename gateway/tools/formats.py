"""The forms in which models write calls, and which of them a chat template speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from gateway.tools import hermes, llama3_json, mistral
from gateway.tools.parser import ToolCallParser
from gateway.tools.tool import Tool
from runtime.grammar.grammar import Grammar


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
    parser: Callable[[], ToolCallParser]
    grammar: WritesGrammar
    prompt_suffix: str = ""
    """What begins calls: put at the end of the prompt where calls are required."""
    begun_parser: Callable[[], ToolCallParser] | None = None
    """Reads an output whose beginning is in the prompt."""

    def parser_for(self, *, begun: bool) -> ToolCallParser:
        """A fresh parser; ``begun``: `prompt_suffix`, if there is one, is at the end of the prompt."""
        if begun and self.begun_parser is not None:
            return self.begun_parser()
        return self.parser()


# The first whose signs are found is meant: more particular ones come first.
FORMATS: Final = (
    ToolFormat("hermes", (hermes.OPEN,), hermes.MARKERS, hermes.HermesParser, hermes.grammar),
    ToolFormat(
        "mistral",
        (mistral.MARK,),
        mistral.MARKERS,
        mistral.MistralParser,
        mistral.grammar,
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
    return next((form for form in FORMATS if any(sign in template for sign in form.signs)), None)
