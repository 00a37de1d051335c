"""Tool support found by probing templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from diptych.runtime.tokenizer.control_tokens import ControlToken
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.model.chat_template import ChatTemplate, Message
from gateway.model.served_model import ServedModel
from gateway.model.tool_support import ToolSupport
from gateway.tools.llama3_json import Llama3JsonParser
from gateway.tools.tool import Mode, Tool, Toolbox
from tests.diptych.runtime.tokenizer.small_models import CHATML, byte_level, write_folder

TOOLBOX = Toolbox((Tool("f"),))
ANSWERS = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{% else %}{{ m.role }}: {{ m.content }}{% endif %}{% endfor %}"
)
SHOWS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    theirs = byte_level()
    theirs.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("marks"), theirs))


def support(tokenizer: Tokenizer, source: str) -> ToolSupport:
    return ToolSupport.of(ChatTemplate(source, tokenizer.control_tokens, {}), tokenizer)


def test_bundled_template_gets_tools_in_the_generic_form(bundled: ServedModel) -> None:
    assert not bundled.tools.tools
    assert not bundled.tools.calls
    assert bundled.tools.generic
    assert isinstance(bundled.tools.parser(TOOLBOX), Llama3JsonParser)


@pytest.mark.parametrize(
    ("source", "tools", "calls", "turns"),
    [
        (CHATML, False, False, True),
        (SHOWS, True, False, False),
        (ANSWERS, False, True, True),
        (SHOWS + ANSWERS, True, True, True),
        ("{{ raise_exception('never') }}", False, False, False),
        ("{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}" + SHOWS, True, False, False),
    ],
)
def test_tool_support_finds_what_a_template_renders(
    tokenizer: Tokenizer, source: str, tools: bool, calls: bool, turns: bool
) -> None:
    found = support(tokenizer, source)
    assert (found.tools, found.calls, found.turns) == (tools, calls, turns)


def test_control_token_markers_are_shown_and_begin_required_calls(tokenizer: Tokenizer) -> None:
    found = support(tokenizer, SHOWS + "{# [TOOL_CALLS] #}")
    mark = tokenizer.id_of("[TOOL_CALLS]")
    assert mark is not None
    assert found.shown == {mark}
    assert found.prompt_suffix == (ControlToken(mark, "[TOOL_CALLS]"),)
    hermes = support(tokenizer, SHOWS + "{# <tool_call> #}")
    assert hermes.shown == frozenset()
    assert hermes.prompt_suffix == ()


def test_text_marker_begins_required_calls_as_text(tmp_path: Path) -> None:
    plain = Tokenizer.load(write_folder(tmp_path, byte_level()))
    found = support(plain, SHOWS + "{# [TOOL_CALLS] #}")
    assert found.shown == frozenset()
    assert found.prompt_suffix == ("[TOOL_CALLS]",)


def test_tool_support_returns_a_parser_when_calls_are_possible(tokenizer: Tokenizer) -> None:
    hermes = support(tokenizer, SHOWS + "{# <tool_call> #}")
    assert hermes.parser(None) is None
    assert hermes.parser(Toolbox(TOOLBOX.tools, Mode.NONE)) is None
    assert hermes.parser(TOOLBOX) is not hermes.parser(TOOLBOX)
    assert support(tokenizer, SHOWS).parser(TOOLBOX) is None


@pytest.mark.parametrize("in_files", [False, True])
def test_tool_template_is_used_for_conversations_with_tools(tmp_path: Path, in_files: bool) -> None:
    hermes = SHOWS + ANSWERS + "{# <tool_call> #}"
    both = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": hermes}]
    folder = write_folder(
        tmp_path, byte_level(), tokenizer_config={} if in_files else {"chat_template": both}
    )
    if in_files:
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(hermes)
    ours, theirs = ServedModel.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert (ours.tools.tools, ours.tools.calls, ours.tools.turns) == (True, True, True)
    assert ours.tools.call_format is not None
    assert ours.tools.call_format.name == "hermes"
    assert ours.chat_template is not None
    for tools in ((), TOOLBOX.tools):
        parts = ours.chat_template.render([Message("user", "Hello")], add_generation_prompt=True, tools=tools)
        expected = theirs.apply_chat_template(
            [{"role": "user", "content": "Hello"}],
            tools=[tool.as_template_value() for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert "".join(part if isinstance(part, str) else part.text for part in parts) == expected
    answered = [Message("user", "Hello"), Message("tool", "42", "f")]
    parts = ours.chat_template.render(answered, add_generation_prompt=True)
    assert parts == ("user: Hellotool: 42",), "answers of tools need that template though none is offered"
