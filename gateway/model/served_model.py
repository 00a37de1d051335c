"""Text side of a served model: card, tokenizer and chat template, no weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diptych.runtime.model_context import limited_context
from diptych.runtime.model_name import model_names
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.model.chat_template import ChatTemplate
from gateway.model.images import ImageSupport
from gateway.model.role_support import RoleSupport
from gateway.model.tool_support import PROBE_TOOL, ToolSupport
from gateway.reasoning.formats import AUTO, format_of
from gateway.reasoning.splitter import ReasoningFormat


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of sampling fields. Greedy unless the model's generation_config.json has ``do_sample``."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, object]) -> SamplingDefaults:
        """Read the defaults; values that no request may have (NaN, text, out of range) are ignored.

        As in transformers the temperature is ignored without ``do_sample: true``.
        """
        samples = config.get("do_sample") is True
        top_k = config.get("top_k")
        return cls(
            temperature=_number(config, "temperature", 0.0, math.inf, 1.0) if samples else 0.0,
            top_p=_number(config, "top_p", 0.0, 1.0, 1.0) or 1.0,
            top_k=top_k if isinstance(top_k, int) and top_k > 0 else 0,
            min_p=_number(config, "min_p", 0.0, 1.0, 0.0),
            repetition_penalty=_number(config, "repetition_penalty", 0.0, math.inf, 1.0) or 1.0,
        )


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Description of a served model. ``max_context`` counts prompt and output tokens together."""

    name: str
    aliases: tuple[str, ...]
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    tokenizer_digest: str  # sha256, hex
    has_chat_template: bool
    served_aliases: tuple[str, ...] = ()  # the further names that were chosen, which are listed

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Tokenizer,
        path: Path,
        name: str | None = None,
        max_context: int | None = None,
        further_names: Sequence[str] = (),
    ) -> ModelCard:
        """Describe the model at ``path``.

        Args:
            tokenizer: of this model.
            path: gives the name if ``name`` is None: the folder's, or the file's without its quantisation.
            name: the name that requests use; with it the file's name is no alias.
            max_context: lowers the model's context to so many tokens.
            further_names: of which the first takes the place of ``name`` where that is None.

        Raises `NamelessModel` or `ContextTooLong`.
        """
        if name is None and further_names:
            name, *further_names = further_names
        names = model_names(path, name)
        served = tuple(one for one in dict.fromkeys(further_names) if one != names.name)
        return cls(
            name=names.name,
            aliases=(*names.aliases, *served),
            served_aliases=served,
            max_context=limited_context(tokenizer.max_context, max_context),
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            defaults=SamplingDefaults.from_generation_config(tokenizer.generation_defaults),
            tokenizer_digest=tokenizer.digest,
            has_chat_template=tokenizer.chat_template is not None,
        )

    def shown_name(self, asked: str) -> str:
        """Return the name of the model in an answer: the asked one, if it is one of the chosen."""
        return asked if asked in self.served_aliases else self.name

    def answers_to(self, name: str) -> bool:
        return name == self.name or name in self.aliases


@dataclass(frozen=True)
class ServedModel:
    """Served model without its weights. Immutable; safe to use from several threads."""

    card: ModelCard
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tools: ToolSupport
    roles: RoleSupport = field(default_factory=RoleSupport)
    roles_beside_tools: RoleSupport = field(default_factory=RoleSupport)
    reasoning: ReasoningFormat | None = None  # None: what the model writes before its answer is text as well
    images: ImageSupport | None = None  # None: it reads text only

    @classmethod
    def load(
        cls,
        path: Path,
        name: str | None = None,
        max_context: int | None = None,
        further_names: Sequence[str] = (),
        chat_template: str | None = None,
        reasoning: str = AUTO,
        mmproj: Path | None = None,
    ) -> ServedModel:
        """Load a GGUF file or a Hugging Face folder.

        ``name`` replaces the name derived from the path, ``max_context`` lowers the model's context, and
        ``chat_template`` replaces its templates. ``reasoning``: as in `gateway.reasoning.formats.format_of`.
        ``mmproj``: as in `diptych.runtime.model_images.model_images`.

        Raises `UnusableTokenizer`, `UnusableImages`, `UnusableTemplate`, `UnusableReasoning`,
        `NamelessModel`, `ContextTooLong` or `OSError`.
        """
        tokenizer = Tokenizer.load(path)
        if chat_template is not None:
            tokenizer = tokenizer.with_chat_template(chat_template)
        images = ImageSupport.of(path, tokenizer, mmproj)
        template = _template(tokenizer, takes_parts=images is not None)
        card = ModelCard.from_tokenizer(tokenizer, path, name, max_context, further_names)
        if template is None:
            return cls(card, tokenizer, None, ToolSupport())
        tools, roles = ToolSupport.of(template, tokenizer), RoleSupport.of(template)
        beside_tools = RoleSupport.of(template, [PROBE_TOOL]) if tools.tools else roles
        thoughts = format_of(template.source, tokenizer, reasoning)
        return cls(card, tokenizer, template, tools, roles, beside_tools, thoughts, images)


def _template(tokenizer: Tokenizer, *, takes_parts: bool) -> ChatTemplate | None:
    control, names = tokenizer.control_tokens, tokenizer.template_names
    source, tool_source = tokenizer.chat_template, tokenizer.tool_template
    if source is None:
        return None
    with_tools = (
        None if tool_source is None else ChatTemplate(tool_source, control, names, takes_parts=takes_parts)
    )
    return ChatTemplate(source, control, names, with_tools=with_tools, takes_parts=takes_parts)


def _number(config: Mapping[str, object], key: str, lowest: float, highest: float, default: float) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return default
    return float(value) if lowest <= value <= highest else default
