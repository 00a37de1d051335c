"""A model as the gateway has it: its card, its tokenizer and its chat template, but no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.model.chat_template import ChatTemplate
from gateway.model.model_card import ModelCard
from gateway.model.tool_support import ToolSupport


@dataclass(frozen=True)
class ServedModel:
    """Immutable; safe to use from several threads."""

    card: ModelCard
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tools: ToolSupport

    @classmethod
    def load(cls, path: Path, name: str | None = None) -> ServedModel:
        """From a GGUF file or a Hugging Face folder; ``name`` replaces the one derived from the path.

        Raises `UnusableTokenizer`, `UnusableTemplate` or `OSError`.
        """
        tokenizer = Tokenizer.load(path)
        template = _template(tokenizer)
        tools = ToolSupport() if template is None else ToolSupport.of(template, tokenizer)
        return cls(ModelCard.from_tokenizer(tokenizer, path, name), tokenizer, template, tools)


def _template(tokenizer: Tokenizer) -> ChatTemplate | None:
    control, names = tokenizer.control_tokens, tokenizer.template_names
    source, tool_source = tokenizer.chat_template, tokenizer.tool_template
    if source is None:
        return None
    with_tools = None if tool_source is None else ChatTemplate(tool_source, control, names)
    return ChatTemplate(source, control, names, with_tools=with_tools)
