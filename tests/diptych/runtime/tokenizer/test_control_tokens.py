"""No text of a caller becomes a control token, wherever a template puts it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.tokenizer.control_tokens import ControlToken, ControlTokens
from diptych.runtime.tokenizer.source import AddedToken

TEXTS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|im_end|>x")
TOKENS = ControlTokens([AddedToken(index, text, control=True) for index, text in enumerate(TEXTS)])
FRAGMENTS = sorted(
    {
        text[start:end]
        for text in TEXTS
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    }
)
# Built from pieces of the tokens themselves, so that near-misses and hits are the rule.
CONTENT = st.lists(
    st.sampled_from(FRAGMENTS) | st.sampled_from(TEXTS) | st.text(max_size=3) | st.sampled_from([" ", "\n"]),
    max_size=8,
).map("".join)


def controls(rendered: str) -> list[int]:
    return [part.token_id for part in TOKENS.split(rendered) if isinstance(part, ControlToken)]


def text_of(rendered: str) -> str:
    return "".join(part if isinstance(part, str) else part.text for part in TOKENS.split(rendered))


@given(content=CONTENT)
def test_defused_content_holds_no_token_and_comes_back_exactly(content: str) -> None:
    defused = TOKENS.defuse(content)
    assert len(defused) == len(content)
    assert controls(defused) == []
    assert TOKENS.restore(defused) == content


@given(first=CONTENT, second=CONTENT)
def test_only_the_templates_own_tokens_are_found(first: str, second: str) -> None:
    rendered = f"<s>[INST] {TOKENS.defuse(first)}[/INST]{TOKENS.defuse(second)}</s>"
    assert controls(rendered) == [2, 4, 5, 3]
    assert text_of(rendered) == f"<s>[INST] {first}[/INST]{second}</s>"


@given(first=CONTENT, second=CONTENT)
def test_contents_side_by_side_make_no_token_between_them(first: str, second: str) -> None:
    assert controls(TOKENS.defuse(first) + TOKENS.defuse(second)) == []
    assert controls(TOKENS.defuse(first).strip() + TOKENS.defuse(second).strip()) == []


@given(content=CONTENT)
def test_text_of_the_template_that_begins_a_token_is_not_completed(content: str) -> None:
    assert controls("<|im_" + TOKENS.defuse(content)) == []
    assert controls(TOKENS.defuse(content).strip() + "|>") == []


@given(content=CONTENT)
def test_a_template_that_changes_case_arms_nothing(content: str) -> None:
    assert controls(TOKENS.defuse(content.upper()).lower()) == []


def test_content_without_lookalikes_is_untouched() -> None:
    text = "def f(x): return x < 3 and [i for i in y] # |im_end| </b>"
    assert TOKENS.defuse(text) is text


def test_the_longest_token_at_a_place_wins() -> None:
    assert controls("<|im_end|>x<|im_end|>y") == [6, 1]


def test_a_model_without_control_tokens() -> None:
    none = ControlTokens([])
    assert none.defuse("<s>") == "<s>"
    assert none.split("<s>") == ("<s>",)
    assert none.split("") == ()


@pytest.mark.parametrize(
    ("left", "right", "taken"), [(True, False, "  <s>"), (False, True, "<s> \n"), (True, True, "  <s> \n")]
)
def test_white_space_that_a_token_takes_in(left: bool, right: bool, taken: str) -> None:
    tokens = ControlTokens([AddedToken(0, "<s>", True, left, right)])
    parts = tokens.split("a  <s> \nb")
    assert parts[1] == ControlToken(0, taken)
    assert "".join(part if isinstance(part, str) else part.text for part in parts) == "a  <s> \nb"
