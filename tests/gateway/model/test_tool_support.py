"""What is found out about templates by trying them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from gateway.model.chat_template import ChatTemplate
from gateway.model.served_model import ServedModel
from gateway.model.tool_support import ToolSupport
from gateway.tools.tool import Mode, Tool, Toolbox
from runtime.tokenizer.control_tokens import ControlToken
from runtime.tokenizer.tokenizer import Tokenizer
from tests.runtime.tokenizer.small_models import CHATML, byte_level, write_folder

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


def test_the_bundled_template_has_no_tools(bundled: ServedModel) -> None:
    assert not bundled.tools.tools
    assert not bundled.tools.calls
    assert bundled.tools.form is None


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
def test_what_a_template_writes(
    tokenizer: Tokenizer, source: str, tools: bool, calls: bool, turns: bool
) -> None:
    found = support(tokenizer, source)
    assert (found.tools, found.calls, found.turns) == (tools, calls, turns)


def test_marks_that_are_control_tokens_are_shown_and_begin_required_calls(tokenizer: Tokenizer) -> None:
    found = support(tokenizer, SHOWS + "{# [TOOL_CALLS] #}")
    mark = tokenizer.id_of("[TOOL_CALLS]")
    assert mark is not None
    assert found.shown == {mark}
    assert found.prompt_suffix == (ControlToken(mark, "[TOOL_CALLS]"),)
    hermes = support(tokenizer, SHOWS + "{# <tool_call> #}")
    assert hermes.shown == frozenset()
    assert hermes.prompt_suffix == ()


def test_a_mark_that_is_no_token_begins_required_calls_as_text(tmp_path: Path) -> None:
    plain = Tokenizer.load(write_folder(tmp_path, byte_level()))
    found = support(plain, SHOWS + "{# [TOOL_CALLS] #}")
    assert found.shown == frozenset()
    assert found.prompt_suffix == ("[TOOL_CALLS]",)


def test_who_reads_calls(tokenizer: Tokenizer) -> None:
    hermes = support(tokenizer, SHOWS + "{# <tool_call> #}")
    assert hermes.parser(None) is None
    assert hermes.parser(Toolbox(TOOLBOX.tools, Mode.NONE)) is None
    assert hermes.parser(TOOLBOX) is not hermes.parser(TOOLBOX)
    assert support(tokenizer, SHOWS).parser(TOOLBOX) is None
