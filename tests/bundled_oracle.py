"""The bundled model as transformers reads it: the oracle of tests in several folders, read once a run.

Either takes transformers many seconds, so the folders' fixtures and functions all come here.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch

from diptych.runtime.settings import BUNDLED_MODEL, resolve_model


@functools.cache
def path() -> Path:
    """The GGUF file."""
    return resolve_model(BUNDLED_MODEL)


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Let transformers read the file's head once, and gguf make its table of names once: it asks for that in
    each of hundreds of modules. That is half of its time.
    """
    cached = (functools.cache(one) for one in (gguf.GGUFReader, gguf.get_tensor_name_map))
    with mock.patch.multiple(gguf, GGUFReader=next(cached), get_tensor_name_map=next(cached)):
        yield


@functools.cache
def model() -> Any:
    """In fp32."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    with _read_once():
        read = AutoModelForCausalLM.from_pretrained(path().parent, gguf_file=path().name, dtype=torch.float32)
    return read.eval()


@functools.cache
def tokenizer() -> Any:
    """As read, that is with GPT-2's pre-tokenizer: who needs another one changes a copy."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    with _read_once():
        return AutoTokenizer.from_pretrained(str(path().parent), gguf_file=path().name)
