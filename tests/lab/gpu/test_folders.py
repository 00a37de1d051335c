"""Folders that the GPU benchmark writes for servers: Diptych reads them, in codes and with experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych.engine.weights.checkpoint import read_checkpoint
from kernels import packed_matrix
from kernels.packed_matrix import PackedMatrix
from lab.gpu.beside import weights_in_log
from lab.gpu.faults import Stream, longest_wait_s
from lab.gpu.llama_folder import write_llama_folder
from lab.gpu.model_step import tiny
from lab.gpu.qwen_moe import fewer_layers, tiny_moe, write_qwen_moe_folder
from lab.gpu.random_model import LLAMA_3_8B

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that gets no tokenizer: converting one takes seconds, and weights want none."""
    monkeypatch.setattr("lab.gpu.llama_folder._write_tokenizer", lambda folder: None)
    return tmp_path


def test_awq_folder_keeps_codes_that_keep_activations_about_one(folder: Path) -> None:
    shape = tiny(LLAMA_3_8B)
    write_llama_folder(folder, shape, CPU, torch.bfloat16, awq_group=16)
    found = read_checkpoint(folder, "packed").weights.layers[0]
    assert isinstance(found.down, PackedMatrix)
    assert found.down.four_bits
    numbers = packed_matrix.dequantise(found.down)
    assert numbers.shape == (32, 48)
    assert 0.8 < float(numbers.std()) * 48**0.5 < 1.2


def test_folder_of_experts_has_the_shape_that_it_was_written_for(folder: Path) -> None:
    shape = fewer_layers(replace(tiny_moe(), layers=tiny_moe().layers * 2), folder)
    write_qwen_moe_folder(folder, shape, CPU, torch.bfloat16)
    found = read_checkpoint(folder, "bf16")
    assert found.shape.num_layers == 2
    assert found.shape.experts == shape.experts
    experts = found.weights.layers[1].experts
    assert experts is not None
    assert len(experts.gates) == 4


def test_weights_of_each_process_are_read_from_its_memory_plan() -> None:
    log = """decode-0 | memory of cuda:0 in MiB: weights 5400, KV pool 9000, CUDA context 600; together 15000
prefill-0 | memory of cuda:0 in MiB: prompt steps 5, weights 5401, small numbers 256; together 5662 of 9"""
    assert weights_in_log(log) == [5400 << 20, 5401 << 20]
    assert weights_in_log("memory of the host: weights 3") == []


def test_wait_is_to_the_end_of_the_longest_pause_behind_the_fault() -> None:
    came = [1.0, 1.1, 2.05, 2.1, 9.0, 9.1]  # at 2.0 it was hit, and something was on its way
    assert longest_wait_s(Stream(came=came), 2.0) == 7.0
    assert longest_wait_s(Stream(came=[1.0]), 2.0) is None
