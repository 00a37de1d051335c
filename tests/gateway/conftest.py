"""The bundled model as the gateway sees it: loaded once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.model.served_model import ServedModel
from tests.runtime.tokenizer.bundled import bundled_path, oracle

__all__ = ["bundled_path", "oracle"]


@pytest.fixture(scope="session")
def bundled(bundled_path: Path) -> ServedModel:
    return ServedModel.load(bundled_path)
