"""The bundled model as transformers reads it: the oracle of tests in several folders, read once a run.

Either takes transformers many seconds, so the folders' fixtures and functions all come here.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

from diptych.runtime.settings import BUNDLED_MODEL, resolve_model


@functools.cache
def path() -> Path:
    """The GGUF file."""
    return resolve_model(BUNDLED_MODEL)


@functools.cache
def model() -> Any:
    """In fp32."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(path().parent, gguf_file=path().name, dtype=torch.float32)
    return read.eval()


@functools.cache
def tokenizer() -> Any:
    """As read, that is with GPT-2's pre-tokenizer: who needs another one changes a copy."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path().parent), gguf_file=path().name)
