"""The bundled model as the gateway sees it: loaded once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.served_model import ServedModel
from runtime.settings import BUNDLED_MODEL, resolve_model


@pytest.fixture(scope="session")
def bundled_path() -> Path:
    return resolve_model(BUNDLED_MODEL)


@pytest.fixture(scope="session")
def bundled(bundled_path: Path) -> ServedModel:
    return ServedModel.load(bundled_path)
