"""Chat template of the model: messages in, control tokens and plain text out.

Templates are Jinja2 programs that come with the model, so they are the operator's and not a caller's. They
still run in Jinja's sandbox (no attributes that lead out, no changes of mutable values, a bounded ``range``)
with a bound on the size of the rendered text and on the rendering time. A caller controls the text of the
messages, their number and their roles; the text is defused (`diptych.runtime.tokenizer.control_tokens`), the
other two are bounded by `gateway.limits`.

The environment is that of transformers' ``apply_chat_template`` (``utils/chat_template_utils.py``): same
white-space rules, ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, loop controls and
the ``generation`` block.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych.runtime.settings import StartupError
from diptych.runtime.tokenizer.control_tokens import ControlToken, ControlTokens
from gateway import limits
from gateway.tools.tool import Tool, ToolCall

_REASONING: Final = "reasoning_content"
_THINKING_SIGNS: Final = ("message.thinking", '"thinking" in message')
# Variables of every rendering; the special tokens' names join them.
_CONTEXT: Final = ("messages", "tools", "documents", "add_generation_prompt")


class UnusableTemplate(StartupError, ValueError):
    """Chat template that is too large or no valid Jinja2."""


class RenderRefused(Exception):
    """Rendering failed or exceeded a bound. The text is the reason, without any content."""


class _Raised(jinja2.TemplateError):
    """Error that the template raised on purpose, with its own words."""


@dataclass(frozen=True, slots=True)
class Message:
    """Message of a conversation. Fields that the caller omitted are empty."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # of assistant turns
    tool_call_id: str = ""  # of tool turns
    reasoning_content: str = ""  # of assistant turns
    parts: tuple[str | None, ...] = ()  # in place of the content: texts, and None for each image


class ChatTemplate:
    """Compiled chat template. Rendering keeps no state: one object serves all requests."""

    def __init__(
        self,
        source: str,
        control_tokens: ControlTokens,
        names: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        with_tools: ChatTemplate | None = None,
        takes_parts: bool = False,
    ) -> None:
        """
        Args:
            source: Jinja2 text.
            control_tokens: of the model's tokenizer.
            names: special tokens that the template may use (``bos_token``, ``eos_token``, …).
            now: clock for templates that write today's date.
            with_tools: the template used instead where tools are given or were called.
            takes_parts: contents are lists of parts, as templates of models with images read them.
        """
        if len(source) > limits.MAX_TEMPLATE_BYTES:
            raise UnusableTemplate(f"the chat template has {len(source)} characters")
        self._control_tokens = control_tokens
        self._names = dict(names)
        environment = _environment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise UnusableTemplate(f"chat template, line {error.lineno}: {error.message}") from error
        self._variables = frozenset(meta.find_undeclared_variables(tree))
        self._reserved = frozenset({*_CONTEXT, *names, *environment.globals})
        self._refusals = tuple(_refusals(tree))
        self._source = source
        self._with_tools = with_tools
        self._takes_parts = takes_parts
        # gpt-oss reads earlier reasoning under another name.
        self._reads_thinking = _REASONING not in source and any(sign in source for sign in _THINKING_SIGNS)

    @property
    def source(self) -> str:
        """Source of the template that renders conversations without tools."""
        return self._source

    @property
    def tool_source(self) -> str:
        """Source of the template that renders tools."""
        return self._source if self._with_tools is None else self._with_tools.tool_source

    def reads_variable(self, name: str) -> bool:
        """Return whether the template reads a top-level variable (a template keyword argument)."""
        return name in self._variables or (
            self._with_tools is not None and self._with_tools.reads_variable(name)
        )

    @property
    def settings(self) -> frozenset[str]:
        """Names of the template keyword arguments that the template reads."""
        own = self._variables - self._reserved
        return own if self._with_tools is None else own | self._with_tools.settings

    def is_reserved(self, name: str) -> bool:
        """Return whether a variable is the conversation's or the model's own, and no setting."""
        return name in self._reserved

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> tuple[ControlToken | str, ...]:
        """Return the prompt as control tokens and plain text, for `Tokenizer.encode_parts`.

        Raises `RenderRefused`.
        """
        if self._with_tools is not None and (tools or any(map(_of_tools, messages))):
            return self._with_tools.render(
                messages, add_generation_prompt=add_generation_prompt, tools=tools, kwargs=kwargs
            )
        context = {
            **self._names,
            "tools": [self._defused_value(tool.as_template_value()) for tool in tools] or None,
            "documents": None,
            **{name: self._defused_value(value) for name, value in (kwargs or {}).items()},
            "messages": [self._defused(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._write(context)
        except RenderRefused as error:
            # DeepSeek's templates write a call's arguments as the text that they expect them to be.
            if not isinstance(error.__cause__, TypeError) or not any(one.tool_calls for one in messages):
                raise
            context["messages"] = [self._defused(message, arguments_as_text=True) for message in messages]
            text = self._write(context)
        return self._control_tokens.split(text)

    def _defused(self, message: Message, *, arguments_as_text: bool = False) -> dict[str, object]:
        fields: dict[str, object] = {
            "role": message.role,
            "content": self._content(message)
            if self._takes_parts
            else self._control_tokens.defuse(message.content),
        }
        if message.name:
            fields["name"] = self._control_tokens.defuse(message.name)
        if message.tool_calls:
            fields["tool_calls"] = [
                self._defused_value(one.as_template_value(arguments_as_text=arguments_as_text))
                for one in message.tool_calls
            ]
        if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
        if message.reasoning_content:
            fields[self._reasoning_field(message)] = self._control_tokens.defuse(message.reasoning_content)
        return fields

    def _content(self, message: Message) -> list[dict[str, str]]:
        """Return a turn's content as a list of parts."""
        return [
            {"type": "image"} if part is None else {"type": "text", "text": self._control_tokens.defuse(part)}
            for part in message.parts or (message.content,)
        ]

    def _reasoning_field(self, message: Message) -> str:
        """Return the member of a turn that has its reasoning."""
        # gpt-oss has another one, and refuses it beside both calls and content.
        both = bool(message.tool_calls and message.content)
        return "thinking" if self._reads_thinking and not both else _REASONING

    def _defused_value(self, value: object) -> object:
        """Defuse all text inside lists and objects, names of members included."""
        if isinstance(value, str):
            return self._control_tokens.defuse(value)
        if isinstance(value, Mapping):
            return {self._control_tokens.defuse(key): self._defused_value(one) for key, one in value.items()}
        return [self._defused_value(one) for one in value] if isinstance(value, list) else value

    def _write(self, context: Mapping[str, object]) -> str:
        written: list[str] = []
        size = 0
        stop_at = time.monotonic() + limits.MAX_RENDER_SECONDS
        try:
            for piece in self._template.generate(context):
                written.append(piece)
                size += len(piece)
                if size > limits.MAX_RENDERED_CHARS or time.monotonic() > stop_at:
                    raise RenderRefused("it writes too much")
        except _Raised as error:
            raise RenderRefused(self._own_words(str(error))) from error
        # Raised by the sandbox, or by an operation on an unexpected message.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise RenderRefused("it does not accept these messages") from error
        except (RecursionError, MemoryError) as error:
            raise RenderRefused("it writes too much") from error
        return "".join(written)

    def _own_words(self, raised: str) -> str:
        """Return what the template says itself in a text that it raised: no word of the conversation."""
        for pattern, words in self._refusals:
            if pattern.fullmatch(raised):
                shown = "".join(char if char.isprintable() else " " for char in words)
                return f'it says "{shown[: limits.MAX_TEMPLATE_REFUSAL_CHARS]}"'
        return "it does not accept these messages"


def _refusals(tree: nodes.Template) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield (pattern of the text, its constant words) of each ``raise_exception`` in a template."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "raise_exception" and call.args:
            parts = list(_text_parts(call.args[0]))
            pattern = "".join(".*" if part is None else re.escape(part) for part in parts)
            words = "".join("…" if part is None else part for part in parts)
            if any(parts):
                yield re.compile(pattern, re.DOTALL), words


def _text_parts(node: nodes.Node) -> Iterator[str | None]:
    """Yield the constant parts of an expression that makes a text, and None for each other part."""
    if isinstance(node, nodes.Const):
        yield str(node.value)
    elif isinstance(node, nodes.Concat):
        for one in node.nodes:
            yield from _text_parts(one)
    elif isinstance(node, nodes.Add):
        yield from _text_parts(node.left)
        yield from _text_parts(node.right)
    else:
        yield None


def _of_tools(message: Message) -> bool:
    return bool(message.tool_calls) or message.role == "tool"


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise _Raised(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _GenerationBlock(Extension):
    """Block ``{% generation %}…{% endgeneration %}``, which marks text for training; renders its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
