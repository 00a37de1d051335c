"""Table of model families in docs/models.md."""

from __future__ import annotations

import re
from pathlib import Path

from diptych.model_families import GGUF_ARCHITECTURES, MODEL_TYPES, WRAPPERS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_every_name_of_a_family_is_documented() -> None:
    named = set(re.findall(r"`([^`]+)`", PAGE.read_text()))
    assert not {*MODEL_TYPES, *GGUF_ARCHITECTURES, *WRAPPERS} - named
