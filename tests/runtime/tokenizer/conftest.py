"""The bundled model's tokenizer, loaded once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from runtime.tokenizer.tokenizer import Tokenizer
from tests.runtime.tokenizer.bundled import bundled_path, oracle

__all__ = ["bundled_path", "oracle"]

# On a machine shared with other builds a first example can take any time; pytest-timeout bounds the test.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def tokenizer(bundled_path: Path) -> Tokenizer:
    return Tokenizer.load(bundled_path)
