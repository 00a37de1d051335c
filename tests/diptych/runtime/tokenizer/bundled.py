"""The bundled model's tokenizer, and transformers' of the same file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from tests import bundled_oracle


@pytest.fixture(scope="session")
def bundled_path() -> Path:
    return bundled_oracle.path()


@pytest.fixture(scope="session")
def oracle() -> Any:
    """transformers' tokenizer of the bundled file.

    It does not read ``tokenizer.ggml.pre`` and takes GPT-2's pre-tokenizer, so SmolLM2's is put in: digits
    one by one, then GPT-2's pattern (the model's own tokenizer.json).
    """
    found = copy.deepcopy(bundled_oracle.tokenizer())
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return found
