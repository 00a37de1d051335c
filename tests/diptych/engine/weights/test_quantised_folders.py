"""Folders of GPTQ, AWQ, compressed-tensors and FP8: the numbers are the format's, or they are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.dtype import choose_precision
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import BadModelFile
from diptych.engine.weights.checkpoint import is_quantised, read_checkpoint, weight_bytes
from kernels.byte_codes import CodedBytes
from kernels.byte_linear import ByteMatrix
from kernels.quantised_linear import BlockMatrix, dequantise
from tests.diptych.engine.weights.quantised_folders import (
    Tensors,
    Writer,
    awq,
    bytes_of_rows,
    change,
    compressed,
    declare,
    four_bit_places,
    fp8,
    gptq,
    groups_of,
    matrices,
    plain_folder,
    quantise,
    write,
)

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
    "iters": 200,
    "autoround_version": "0.5.1",
    "block_name_to_quantize": "model.layers",
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, "a": {"bits": 4, "group_size": 32}},
}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
SQUARES = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}

KINDS: dict[str, tuple[Mapping[str, Any], Writer]] = {
    "gptq": (GPTQ, gptq()),
    "gptq of eight bits": ({**GPTQ, "bits": 8}, gptq(bits=8)),
    "gptq of two bits": ({**GPTQ, "bits": 2}, gptq(bits=2)),
    "gptq, one group": ({**GPTQ, "group_size": -1}, gptq(group=-1)),
    "gptq, ordered": ({**GPTQ, "desc_act": True}, gptq(ordered=True)),
    "gptq, zeros as they are": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(version=2)),
    "auto-round": (AUTO_ROUND, gptq()),
    "auto-round of eight bits, an older record": (
        {"quant_method": "intel/auto-round", "bits": 8, "group_size": 32},
        gptq(bits=8),
    ),
    "auto-round as awq": ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, awq()),
    "awq": (AWQ, awq()),
    "awq, wide groups": ({**AWQ, "group_size": 64}, awq(group=64)),
    "int4": (groups_of(INT4, format="pack-quantized"), compressed()),
    "int4 with zeros": (groups_of({**INT4, "symmetric": False}), compressed(zeros=True)),
    "int4, ordered": (groups_of({**INT4, "actorder": "group"}), compressed(ordered=True)),
    "packed int8": (groups_of({**INT8, "group_size": None}), compressed(bits=8, group=-1)),
    "int8": (groups_of(INT8, format="int-quantized"), compressed(bits=8, group=-1, packed=False)),
    "int8 with zeros": (
        groups_of({**INT8, "symmetric": False}),
        compressed(bits=8, group=-1, packed=False, zeros=True),
    ),
    "float8, outputs": (groups_of(FLOAT8, format="float-quantized"), fp8("weight_scale", "outputs")),
    "float8, rectangles": (
        groups_of({**FLOAT8, "strategy": "block", "block_structure": [32, 32]}),
        fp8("weight_scale", "rectangles"),
    ),
    "fp8, rectangles": (SQUARES, fp8("weight_scale_inv", "rectangles")),
    "nf4": (FOUR_BITS, four_bit_places(nested=False)),
    "nf4 with nested peaks": (FOUR_BITS, four_bit_places(nested=True)),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bytes_of_rows),
    "fp8, one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("weight_scale", "matrix")),
}
IN_CODES = (
    "gptq",
    "gptq, one group",
    "gptq, zeros as they are",
    "auto-round",
    "auto-round as awq",
    "awq",
    "awq, wide groups",
    "int4",
    "int4 with zeros",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return plain_folder(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_that_the_format_means(folder: Path, kind: str) -> None:
    numbers = write(folder, *KINDS[kind])
    read = matrices(folder, "fp32")
    assert read.keys() == numbers.keys()
    for name, matrix in read.items():
        assert torch.equal(matrix, numbers[name]), name


@pytest.mark.parametrize("kind", IN_CODES)
def test_codes_of_four_bits_are_kept_as_they_are(folder: Path, kind: str) -> None:
    numbers = write(folder, *KINDS[kind])
    for name, matrix in matrices(folder, "gguf").items():
        assert isinstance(matrix, BlockMatrix)
        assert matrix.format == "q4_1"
        # Half a unit in the last place of half precision, of the largest `scale * zero`.
        assert (dequantise(matrix) - numbers[name]).abs().max() <= 0.021 * 15 / 2048
    assert all(isinstance(matrix, CodedBytes) for matrix in matrices(folder, "int8").values())
    assert is_quantised(folder)
    assert choose_precision(quantised_file=True, native=True, cpu_features=[]) == "gguf"
    assert weight_bytes(folder) == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - set(IN_CODES)))
def test_what_fits_no_block_is_made_of_the_numbers(folder: Path, kind: str) -> None:
    write(folder, *KINDS[kind])
    assert not is_quantised(folder)
    with pytest.raises(UnsupportedModel, match="dtype gguf"):
        read_checkpoint(folder, "gguf")
    assert all(isinstance(matrix, ByteMatrix) for matrix in matrices(folder, "int8").values())


def test_what_is_multiplied_together_is_kept_alike(folder: Path) -> None:
    numbers = write(folder, *KINDS["int4"], keep=("k_proj", "down_proj"))
    kept = {name: m.format for name, m in matrices(folder, "gguf").items()}
    assert {kind for name, kind in kept.items() if "self_attn.o" in name or "mlp.up" in name} == {"q4_1"}
    whole = ("q_proj", "k_proj", "v_proj", "down_proj")
    assert {kind for name, kind in kept.items() if name.endswith(whole)} == {"q8_0"}
    read = matrices(folder, "fp32")
    assert all(torch.equal(read[name], numbers[name]) for name in numbers)


def test_a_quantised_head_is_the_model_s_own(folder: Path) -> None:
    quantised = gptq()(96, 64)

    def edit(tensors: Tensors) -> None:
        quantise(tensors, gptq())
        del tensors["lm_head.weight"]
        tensors |= {f"lm_head.{part}": tensor for part, tensor in quantised.parts.items()}

    declare(folder, {**GPTQ, "lm_head": True})
    change(folder, edit)
    assert torch.equal(read_checkpoint(folder, "fp32").weights.output_matrix(), quantised.numbers)


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq': supported are gptq, awq"),
        ({**GPTQ, "bits": 3}, "bits 3"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "dynamic": {"-:.*down": {}, "+:.*up": {"bits": 8}}}, "dynamic"),
        ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"}, "packing_format 'auto_round:llm"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type 'mx_fp': of AutoRound's int is read"),
        ({**AUTO_ROUND, "bits": 3, "extra_config": {}}, "bits 3"),
        ({**AUTO_ROUND, "extra_config": {"m": {"bits": 8}}}, "extra_config: m is quantised in another way"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**AWQ, "bits": 8}, "bits 8"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**SQUARES, "fmt": "e5m2"}, "fmt 'e5m2'"),
        (groups_of({**FLOAT8, "num_bits": 4}), "config_groups: float weights of 4 bits"),
        (groups_of({**INT4, "num_bits": 3}), "config_groups: int weights of 3 bits"),
        (groups_of(INT4, transform_config={"R1": {}}), "transform_config"),
        (groups_of(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        (
            {**groups_of(INT4), "config_groups": {"a": {"weights": INT4}, "b": {"weights": INT8}}},
            "config_groups: all matrices must be quantised alike",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_its_field(
    folder: Path, quantization: dict[str, Any], field: str
) -> None:
    declare(folder, quantization)
    with pytest.raises(UnsupportedModel, match=rf"^quantization_config\.{field}"):
        read_checkpoint(folder, "fp32")


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "part", "damage", "said"),
    [
        ("gptq", "scales", lambda t: t[:1], r"scales are \(64, 1\)"),
        ("gptq", "qweight", lambda t: t.float(), r"not rows of int32"),
        ("gptq", "g_idx", lambda t: t.flip(0), "desc_act false denies"),
        ("gptq, ordered", "g_idx", lambda t: t + 4, "g_idx does not name one of 4 groups"),
        ("awq", "qzeros", lambda t: t[:, :4], "zeros are"),
        ("int4", "weight_shape", lambda t: t + 8, "has .* numbers, not"),
        ("int8", "weight", lambda t: t.float(), "not int8"),
        ("nf4", "weight", lambda t: t[:9], "64 times 128 numbers of four bits"),
        ("nf4", "weight.absmax", lambda t: t[:9], "9 peaks"),
        ("nf4 with nested peaks", "weight.nested_absmax", lambda t: t[:0], "not quantised as its state says"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:9], "not the state of a matrix"),
        ("llm.int8", "SCB", lambda t: t[:9], "with 9 scales"),
        ("fp8, rectangles", "weight_scale_inv", lambda t: t[:1], "has scales"),
        ("float8, outputs", "weight_scale", lambda t: t[:3], "has scales"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    folder: Path, kind: str, part: str, damage: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    write(folder, *KINDS[kind])
    name = f"{DOWN}.{part}"
    change(folder, lambda tensors: tensors.update({name: damage(tensors[name]).contiguous()}))
    with pytest.raises(BadModelFile, match=rf"{DOWN}.*{said}"):
        read_checkpoint(folder, "fp32")


def test_a_part_that_is_missing_is_named(folder: Path) -> None:
    write(folder, *KINDS["awq"])
    change(folder, lambda tensors: tensors.pop(f"{DOWN}.qzeros"))
    with pytest.raises(BadModelFile, match=rf"{DOWN}\.qzeros is missing"):
        read_checkpoint(folder, "fp32")


def test_an_embedding_with_a_scale_is_refused(folder: Path) -> None:
    """Rows would be looked up without their scale."""
    write(folder, *KINDS["int8"])
    name = "model.embed_tokens"
    quantised = compressed(bits=8, group=-1, packed=False)(96, 64)
    change(folder, lambda tensors: tensors.update({f"{name}.{k}": t for k, t in quantised.parts.items()}))
    with pytest.raises(UnsupportedModel, match=rf"tensor {name}\.weight_scale is not computed"):
        read_checkpoint(folder, "fp32")


def test_biases_of_nothing_but_zeros_are_no_hindrance(folder: Path) -> None:
    write(folder, *KINDS["gptq"])
    change(folder, lambda tensors: tensors.update({f"{DOWN}.bias": torch.zeros(64)}))
    assert read_checkpoint(folder, "fp32").shape.num_layers == 2
    change(folder, lambda tensors: tensors.update({f"{DOWN}.bias": torch.ones(64)}))
    with pytest.raises(UnsupportedModel, match=rf"tensor {DOWN}\.bias is not computed"):
        read_checkpoint(folder, "fp32")
