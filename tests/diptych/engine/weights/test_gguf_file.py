"""GGUF files: the layout of each family, quantised tensors, and files that must be refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import BadModelFile, Matrix, gguf_file
from diptych.engine.weights.checkpoint import has_kquants, is_quantised, read_checkpoint, weight_bytes
from diptych.engine.weights.gguf_header import read_header
from kernels import byte_linear
from kernels.byte_linear import ByteMatrix
from kernels.kquants import KQuantFormat
from kernels.quantised_linear import BlockMatrix, dequantise, quantise_matrix
from tests.diptych.engine.weights.gguf_files import CONFIGS, SIZES, interleaved, logits, oracle_of, write
from tests.kernels.kquant_blocks import quantise


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_gives_the_logits_of_its_source(name: str, tmp_path: Path) -> None:
    oracle, path, ids = oracle_of(name), tmp_path / "model.gguf", list(range(40))
    write(oracle, path, name.split("-")[0])
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits(path, ids), expected, atol=1e-4, rtol=0)


def test_quantised_tensors_come_back_near(tmp_path: Path) -> None:
    oracle, path = oracle_of("llama"), tmp_path / "model.gguf"
    write(oracle, path, "llama", quantise=True)
    down = read_checkpoint(path, "fp32").weights.layers[1].down
    exact = oracle.model.layers[1].mlp.down_proj.weight
    assert 0 < (down - exact).abs().max() < exact.abs().max() / 120


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_1"])
def test_blocks_are_the_numbers_that_gguf_says_in_any_number_of_dimensions(
    shape: tuple[int, ...], kind: str, tmp_path: Path
) -> None:
    packed = gguf.GGMLQuantizationType[kind]
    numbers = np.random.default_rng(3).standard_normal(shape, dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("any", gguf.quants.quantize(numbers, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_header(tmp_path / "model.gguf").tensors["any"]
    meant = gguf.quants.dequantize(np.asarray(tensor.data), packed)
    assert torch.equal(gguf_file.dequantised(tensor), torch.from_numpy(meant))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path, broken = tmp_path / "model.gguf", tmp_path / "broken.gguf"
    write(oracle_of("llama"), path, "llama")
    whole = path.read_bytes()
    for length in (0, 3, 20, 200, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:length])
        with pytest.raises(BadModelFile):
            read_checkpoint(broken, "fp32")
    broken.write_bytes(b"GGUF" + bytes(range(256)) * 4)
    with pytest.raises(BadModelFile):
        read_checkpoint(broken, "fp32")


def test_flipped_header_bytes_never_escape_the_error_types(tmp_path: Path) -> None:
    path, broken = tmp_path / "model.gguf", tmp_path / "broken.gguf"
    write(oracle_of("llama"), path, "llama")
    whole = bytearray(path.read_bytes())
    refused = 0
    for position in range(4, 2200, 23):
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        broken.write_bytes(damaged)
        try:
            read_checkpoint(broken, "fp32")
        except (BadModelFile, UnsupportedModel):
            refused += 1
    assert refused > 30


def test_another_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("llama"), path, "bloom")
    with pytest.raises(UnsupportedModel, match="bloom"):
        read_checkpoint(path, "fp32")


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_k.bias",
        "blk.1.attn_q.bias",
        "blk.1.attn_sub_norm.weight",
        "blk.0.attn_q.scale",
        "blk.2.attn_norm.weight",
        "blk.01.attn_norm.weight",
        "output_norm.bias",
    ],
)
def test_a_tensor_that_is_not_read_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("llama"), path, "llama", tensors={name: np.ones(64)})
    with pytest.raises(UnsupportedModel, match=f"tensor {name} is not computed"):
        read_checkpoint(path, "fp32")


def test_angles_that_an_old_converter_left_are_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("llama"), path, "llama", tensors={"blk.0.attn_rot_embd.weight": np.ones(8)})
    assert read_checkpoint(path, "fp32").shape.num_layers == 2


def test_a_qwen3_without_its_norms_of_heads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("llama"), path, "qwen3")
    with pytest.raises(BadModelFile, match=r"tensor blk\.0\.attn_q_norm\.weight is missing"):
        read_checkpoint(path, "fp32")


def test_the_blocks_of_a_file_are_kept_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("llama"), path, "llama", quantise=True)
    kept, full = read_checkpoint(path, "gguf").weights, read_checkpoint(path, "fp32").weights
    assert kept.storage == "blocks"
    assert full.storage == "dense"
    for ours, theirs in zip(kept.layers, full.layers, strict=True):
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            matrix, numbers = getattr(ours, name), getattr(theirs, name)
            assert isinstance(matrix, BlockMatrix)
            assert torch.equal(dequantise(matrix), numbers)
        assert torch.equal(ours.input_norm, theirs.input_norm)
    head = kept.output_matrix()
    assert isinstance(head, BlockMatrix)
    assert torch.equal(dequantise(head), full.output_matrix())
    assert kept.embed.dtype == torch.bfloat16


def test_a_file_of_full_numbers_is_quantised_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("qwen2"), path, "qwen2")
    assert not is_quantised(path)
    full = read_checkpoint(path, "fp32").weights
    weights = read_checkpoint(path, "gguf").weights
    down, head = weights.layers[1].down, weights.output_matrix()
    assert isinstance(down, BlockMatrix)
    assert isinstance(head, BlockMatrix)
    assert down.format == head.format == "q8_0"
    assert torch.equal(down.blocks, quantise_matrix(full.layers[1].down).blocks)
    assert torch.equal(weights.layers[1].q_bias, full.layers[1].q_bias)


@pytest.mark.parametrize("quantised_file", [True, False])
def test_int8_is_bytes_whatever_the_file(tmp_path: Path, quantised_file: bool) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("llama"), path, "llama", quantise=quantised_file)
    full, weights = read_checkpoint(path, "fp32").weights, read_checkpoint(path, "int8").weights
    assert weights.storage == "bytes"
    for ours, theirs in zip(weights.layers, full.layers, strict=True):
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            assert_bytes_of(getattr(ours, name), getattr(theirs, name))
        assert torch.equal(ours.input_norm, theirs.input_norm)
    assert_bytes_of(weights.output_matrix(), full.output_matrix())
    assert weights.embed.dtype == torch.bfloat16


def assert_bytes_of(matrix: Matrix, numbers: torch.Tensor) -> None:
    """Assert that `matrix` has the numbers as bytes, and nothing else."""
    assert isinstance(matrix, ByteMatrix)
    expected = byte_linear.quantise_matrix(numbers)
    assert torch.equal(matrix.values, expected.values)
    assert torch.equal(matrix.scales, expected.scales)


def test_matrices_of_one_product_share_a_format(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("qwen3"), path, "qwen3", quantise=True, but="attn_v")
    assert is_quantised(path)
    layer = read_checkpoint(path, "gguf").weights.layers[0]
    exact = read_checkpoint(path, "fp32").weights.layers[0]
    assert {m.format for m in (layer.q, layer.k, layer.v, layer.o)} == {"q8_0"}
    assert torch.equal(layer.v.blocks, quantise_matrix(exact.v).blocks)
    assert torch.equal(dequantise(layer.o), exact.o)


def test_split_file_is_read_whole_by_any_of_its_parts(tmp_path: Path) -> None:
    oracle = oracle_of("llama")
    write(oracle, tmp_path / "whole.gguf", "llama")
    write(oracle, tmp_path / "m.gguf", "llama", tensors_a_part=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    expected = logits(tmp_path / "whole.gguf", [3, 1, 4, 1, 5])
    for part in parts:
        assert torch.equal(logits(part, [3, 1, 4, 1, 5]), expected)
    assert weight_bytes(parts[1]) == sum(part.stat().st_size for part in parts)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write(oracle_of("llama"), tmp_path / "m.gguf", "llama", tensors_a_part=8)
    first, second, third = sorted(tmp_path.glob("m-*.gguf"))
    data = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(BadModelFile, match=f"{second.name}: not the part that its name says"):
        read_header(first)
    second.unlink()
    with pytest.raises(BadModelFile, match=f"{second.name}: this part of the split file is missing"):
        read_header(first)
    second.write_bytes(data[:-1])
    with pytest.raises(BadModelFile, match=f"{second.name}: tensor .* reaches beyond the end"):
        read_header(first)


K_QUANTS = get_args(KQuantFormat)
WIDE = LlamaConfig(
    **SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}
)


def _write_kquants(path: Path, kinds: Mapping[str, KQuantFormat]) -> None:
    """Write a model of which the matrices whose names begin so are K-quants, the others Q8_0."""
    torch.manual_seed(4)
    oracle = AutoModelForCausalLM.from_config(WIDE).eval()
    as_file = {}
    for name, matrix in oracle.named_parameters():
        kind = next((kind for begin, kind in kinds.items() if begin in name), None)
        if kind is not None:
            rows = matrix.detach()
            if "q_proj" in name or "k_proj" in name:
                heads = WIDE.num_attention_heads if "q_proj" in name else WIDE.num_key_value_heads
                rows = torch.from_numpy(interleaved(rows.numpy(), heads))
            blocks = quantise(rows.reshape(-1, 256), kind)
            as_file[name] = kind, blocks.view(len(rows), -1).numpy()
    write(oracle, path, "llama", quantise=True, blocks=as_file)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_kquants_are_kept_and_stand_for_the_numbers_of_the_gguf_package(
    kind: KQuantFormat, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    _write_kquants(path, {"_proj": kind})
    assert is_quantised(path)
    assert has_kquants(path)
    kept, full = (read_checkpoint(path, precision).weights.layers[0] for precision in ("gguf", "fp32"))
    stored = read_header(path).tensors["blk.0.ffn_down.weight"]
    expected = gguf.quants.dequantize(np.asarray(stored.data), stored.kind)
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        matrix = getattr(kept, name)
        assert isinstance(matrix, BlockMatrix)
        assert matrix.format == kind
        assert torch.equal(dequantise(matrix), getattr(full, name))
    assert np.array_equal(full.down.numpy(), expected)
    assert isinstance(read_checkpoint(path, "int8").weights.layers[0].down, ByteMatrix)


def test_values_keep_their_own_format_beside_queries_and_keys(tmp_path: Path) -> None:
    """Mix formats as Q4_K_M does. Gate and up, whose rows take turns in one matrix, need one format."""
    path = tmp_path / "m.gguf"
    _write_kquants(path, {"v_proj": "q6_k", "gate_proj": "q5_k", "_proj": "q4_k"})
    layer = read_checkpoint(path, "gguf").weights.layers[0]
    formats = {name: getattr(layer, name).format for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert formats == dict.fromkeys(("q", "k", "o", "down"), "q4_k") | {
        "v": "q6_k",
        "gate": "q8_0",
        "up": "q8_0",
    }
