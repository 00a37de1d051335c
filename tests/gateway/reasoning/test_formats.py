"""Choice of the format of reasoning by chat template and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.reasoning.formats import NAMES, RULES, UnusableReasoning, format_of
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder


def tokenizer_with(folder: Path, *texts: str) -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    return Tokenizer.load(write_folder(folder, made))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_format_is_found_by_template_and_tokens(tmp_path: Path, rule: object) -> None:
    marks = rule.marks  # type: ignore[attr-defined]
    name = rule.name  # type: ignore[attr-defined]
    tokenizer = tokenizer_with(tmp_path / "with", *marks)
    found = format_of(f"x {rule.signs[0]} y", tokenizer)  # type: ignore[attr-defined]
    assert found is not None
    assert found.name == name
    assert format_of("no sign", tokenizer) is None
    assert format_of(f"x {marks[0]} y", tokenizer, "none") is None
    chosen = format_of("no sign", tokenizer, name)
    assert chosen is not None
    assert chosen.name == name
    # A mark that is several tokens marks nothing.
    without = tokenizer_with(tmp_path / "without", *marks[:-1])
    assert format_of(f"x {rule.signs[0]} y", without) is None  # type: ignore[attr-defined]
    with pytest.raises(UnusableReasoning, match=f"--reasoning-parser {name}: .* has no tokens"):
        format_of("", without, name)


def test_the_setting_names_every_format() -> None:
    from typing import get_args

    from gateway.config import GatewaySettings

    setting = GatewaySettings.model_fields["reasoning_parser"].annotation
    assert set(get_args(setting)) == {"auto", "none", *NAMES}
