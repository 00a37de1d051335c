"""The bundled model's tokenizer, loaded once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from tests.diptych.runtime.tokenizer.bundled import bundled_path, oracle

__all__ = ["bundled_path", "oracle"]


@pytest.fixture(scope="session")
def tokenizer(bundled_path: Path) -> Tokenizer:
    return Tokenizer.load(bundled_path)
