"""The bundled model's tokenizer, and transformers' of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from runtime.settings import BUNDLED_MODEL, resolve_model


@pytest.fixture(scope="session")
def bundled_path() -> Path:
    return resolve_model(BUNDLED_MODEL)


@pytest.fixture(scope="session")
def oracle(bundled_path: Path) -> Any:
    """transformers' tokenizer of the bundled file.

    It does not read ``tokenizer.ggml.pre`` and takes GPT-2's pre-tokenizer, so SmolLM2's is put in: digits
    one by one, then GPT-2's pattern (the model's own tokenizer.json).
    """
    transformers = pytest.importorskip("transformers")
    found = transformers.AutoTokenizer.from_pretrained(str(bundled_path.parent), gguf_file=bundled_path.name)
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return found
