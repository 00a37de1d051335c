"""The random models of the comparison with llama.cpp are legal files; its table says what was measured."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.dtype import Precision
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from lab.beside_llama.memory import family_of, pss_of
from lab.beside_llama.random_models import EXPERTS_1B, LLAMA_1B, MAKE, Model, tensors, write
from lab.beside_llama.table import MEMORY, PSS, markdown
from lab.peers.cells import Cell, Measurement

DENSE = Model("dense", "llama", 16, 256, 512, 4, 2, 64, 3_000, 10_000.0)
EXPERTS = Model("experts", "qwen3moe", 2, 64, 32, 4, 2, 16, 3_000, 10_000.0, experts=8, experts_a_token=2)
SMAPS = """7f00-7f10 r--s 00000000 00:01 7 /memfd:diptych-weights (deleted)
Size:               1024 kB
Pss:                 512 kB
Pss_Dirty:             0 kB
7f10-7f20 rw-s 00000000 00:01 8 /memfd:diptych-kv (deleted)
Pss:                 300 kB
7f20-7f30 r--s 00000000 00:01 7 /memfd:diptych-weights (deleted)
Pss:                  88 kB
"""


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K])
def test_random_blocks_stand_for_numbers_about_zero(kind: gguf.GGMLQuantizationType) -> None:
    made = MAKE[kind]((64, 2048), np.random.default_rng(1))
    numbers = gguf.quants.dequantize(made, kind)
    assert numbers.shape == (64, 2048)
    assert abs(numbers.mean()) < 0.05 * numbers.std()
    assert numbers.std() == pytest.approx(2048**-0.5, rel=0.1)


@pytest.mark.parametrize(("model", "billions"), [(LLAMA_1B, 1.236), (EXPERTS_1B, 0.988)])
def test_models_have_as_many_weights_as_they_say(model: Model, billions: float) -> None:
    count = sum(int(np.prod(shape)) for _, _, shape in tensors(model))
    assert count == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize(("model", "dtype"), [(DENSE, "gguf"), (EXPERTS, "bf16")])
def test_random_model_is_served_by_the_native_step(tmp_path: Path, model: Model, dtype: Precision) -> None:
    path = write(model, tmp_path)
    loaded = load_model(path, dtype)
    assert isinstance(loaded.backend, NativeBackend)
    memory = KVMemory(loaded.kv_layout(16), 2)
    logits = loaded.backend.forward([SequenceStep(memory, range(2), 0, [300, 17, 2999], True)], None)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1
    tokenizer = Tokenizer.load(path)
    text = "Words of letters, no more"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text


def test_memory_counts_the_weights_mappings_alone() -> None:
    assert pss_of(SMAPS) == 600 * 1024
    assert os.getpid() in list(family_of(os.getppid()))


def test_table_takes_ratios_within_a_round() -> None:
    rates = {("ours", 0): 30.0, ("theirs", 0): 10.0, ("ours", 1): 20.0, ("theirs", 1): 20.0}
    measured = [
        Measurement(Cell(number, name, "C=16"), {"output_throughput": rate, "median_itl_ms": None})
        for (name, number), rate in rates.items()
    ]
    measured.append(Measurement(Cell(0, "ours", MEMORY), {PSS: 3.0 * 2**20}))
    lines = markdown(["ours", "theirs"], [16], measured, 2 * 2**20).splitlines()
    assert lines[2] == "| 16 | tokens/s | 25.0 | 15.0 | 2.00 (1.00–3.00) |"
    assert lines[4] == "| 16 | ITL p50, ms | – | – | – |"
    assert lines[-1] == "Pss of the weights' mappings: 3 MiB, 1.50 times the file."
