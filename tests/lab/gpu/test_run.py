"""A run of all sections: one that fails loses itself only, and says so in both files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from lab.gpu.__main__ import line_of, main, run, sections
from lab.gpu.model_step import tiny
from lab.gpu.random_model import LLAMA_3_8B, QWEN3_8B, matrix_elements, random_weights
from lab.gpu.results import described, save
from lab.gpu.section import Context, Figure, Unmeasured, figure

CPU = torch.device("cpu")


def context() -> Context:
    return Context(CPU, quick=True, say=lambda line: None)


def whole(context: Context) -> Iterator[Figure]:
    yield figure("whole", "copy", 4.3, "TB/s", against="peer", ratio=0.8, at_least=0.85)


def broken(context: Context) -> Iterator[Figure]:
    yield figure("broken", "first", 1.0, "ms")
    raise RuntimeError("a kernel | failed")


def missing(context: Context) -> Iterator[Figure]:
    raise Unmeasured("no peer here")
    yield


def test_what_fails_leaves_its_error_and_what_it_had(tmp_path: Path) -> None:
    outcomes = [run(s.__name__, s, context()) for s in (whole, broken, missing)]
    assert [len(outcome.figures) for outcome in outcomes] == [1, 1, 0]
    assert [o.error for o in outcomes] == [None, "RuntimeError: a kernel | failed", "no peer here"]
    path = save(tmp_path, described(CPU), outcomes)
    text = path.read_text()
    assert "| copy | 4.3 TB/s | 0.80 | peer | 0.85 **missed** |" in text
    assert "Not measured: no peer here" in text
    data = json.loads(path.with_suffix(".json").read_text())
    assert data["sections"][1]["error"].startswith("RuntimeError")
    assert data["machine"]["torch"] == torch.__version__


def test_without_a_gpu_every_section_says_so_and_the_command_too() -> None:
    if torch.cuda.is_available():
        return
    assert main([]) == 1
    for name, section in sections().items():
        outcome = run(name, section, context())
        assert (outcome.error, outcome.figures) == ("no CUDA device", ()), name


def test_random_models_compute_and_are_as_large_as_their_names() -> None:
    assert round(matrix_elements(LLAMA_3_8B) / 1e9, 2) == 7.5
    assert round(matrix_elements(QWEN3_8B) / 1e9, 2) == 7.57
    shape = replace(tiny(QWEN3_8B), layers=QWEN3_8B.layers[:2])
    weights = random_weights(shape, CPU, torch.float32)
    memory = KVMemory(KVLayout(2, shape.num_kv_heads, 16, 16, torch.float32), 2)
    logits = TorchBackend(shape, weights).forward([SequenceStep(memory, [0, 1], 0, [1, 2, 3], True)], None)
    assert logits.isfinite().all()
    assert 0.1 < float(logits.std()) < 10


def test_a_figure_is_printed_beside_its_ratio_target_and_limit() -> None:
    made = figure(
        "q", "a layer", 100.04, "µs", against="bf16", ratio=1.18, at_least=2.0, note="70 µs by bytes"
    )
    assert line_of(made) == "a layer: 100 µs, 1.18 of bf16, target 2 missed, 70 µs by bytes"
    assert line_of(figure("q", "copy", 4.0, "TB/s")) == "copy: 4 TB/s"
