"""The bundled model, loaded once for all tests of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.loaded_model import Model, load_model
from tests import bundled_oracle


@pytest.fixture(scope="session")
def bundled_path() -> Path:
    return bundled_oracle.path()


@pytest.fixture(scope="session", params=["torch", "native"])
def bundled_model(bundled_path: Path, request: pytest.FixtureRequest) -> Model:
    return load_model(bundled_path, torch.float32, backend=request.param)


@pytest.fixture(scope="session")
def oracle() -> Any:
    return bundled_oracle.model()


@pytest.fixture(scope="session")
def bundled_tokenizer() -> Any:
    return bundled_oracle.tokenizer()
