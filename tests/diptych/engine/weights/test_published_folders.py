"""Quantised folders as their tools publish them, where they differ from what one would write oneself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import BadModelFile
from diptych.engine.weights.checkpoint import is_quantised, read_checkpoint
from diptych.engine.weights.quantised import Codes, scheme_of
from tests.diptych.engine.weights.quantised_folders import (
    Held,
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
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return plain_folder(tmp_path)


def every(part: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Edits this part of every matrix."""

    def apply(tensors: Tensors) -> None:
        tensors |= {name: edit(t).contiguous() for name, t in tensors.items() if name.endswith(f".{part}")}

    return apply


def check(folder: Path, numbers: Mapping[str, torch.Tensor]) -> None:
    read = matrices(folder, "fp32")
    assert read.keys() == numbers.keys()
    for name, matrix in read.items():
        assert torch.equal(matrix, numbers[name]), name


@pytest.mark.parametrize(
    ("said", "writer"),
    [
        ({"format": "gptq_v2"}, gptq(version=2)),
        ({"format": "gptq"}, gptq()),
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, gptq(version=2)),
        ({"dynamic": {}}, gptq()),
        ({"group_size": None}, gptq(group=-1)),
    ],
)
def test_gptq_s_fields_have_several_names(folder: Path, said: dict[str, Any], writer: Writer) -> None:
    check(folder, write(folder, {**GPTQ, **said}, writer))


def test_gptq_s_rules_may_leave_matrices_out(folder: Path) -> None:
    check(folder, write(folder, {**GPTQ, "dynamic": {"-:.*down": {}}}, gptq(), keep=("down",)))


def test_awq_s_layout_has_several_names(folder: Path) -> None:
    declare(folder, {"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemv"})
    with pytest.raises(UnsupportedModel, match="'gemv'"):
        read_checkpoint(folder, "fp32")
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "checkpoint_format": "GEMM"}
    check(folder, write(folder, said, awq()))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_bitsandbytes_stores_bytes_as_other_types_for_fsdp(folder: Path, storage: torch.dtype) -> None:
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": str(storage)}
    numbers = write(folder, said, four_bit_places(nested=True))

    def retype(tensors: Tensors) -> None:
        for matrix in numbers:
            weight = tensors[f"{matrix}.weight"]
            tensors[f"{matrix}.weight"] = weight.flatten().view(storage)[:, None]

    change(folder, retype)
    check(folder, numbers)


@pytest.mark.parametrize("said", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_bitsandbytes_did_not_always_say_its_name(folder: Path, said: dict[str, Any]) -> None:
    writer = four_bit_places(nested=False) if "load_in_4bit" in said else bytes_of_rows
    check(folder, write(folder, said, writer))


@pytest.mark.parametrize("actorder", ["group", "dynamic", "GROUP", True])
def test_llm_compressor_has_several_names_for_ordered_inputs(folder: Path, actorder: object) -> None:
    check(folder, write(folder, groups_of({**INT4, "actorder": actorder}), compressed(ordered=True)))


def test_an_order_that_was_never_found_is_none(folder: Path) -> None:
    numbers = write(folder, groups_of({**INT4, "actorder": "group"}), compressed())

    def edit(tensors: Tensors) -> None:
        tensors |= {f"{m}.weight_g_idx": torch.full((n.shape[1],), -1) for m, n in numbers.items()}

    change(folder, edit)
    check(folder, numbers)


def test_symmetric_matrices_may_have_zeros_of_zero(folder: Path) -> None:
    for dtype in (torch.int8, torch.int32):
        numbers = write(plain_folder(folder), groups_of(INT4), compressed())

        def edit(tensors: Tensors, numbers: Any = numbers, dtype: torch.dtype = dtype) -> None:
            for matrix in numbers:
                scales = tensors[f"{matrix}.weight_scale"]
                tensors[f"{matrix}.weight_zero_point"] = torch.zeros_like(scales, dtype=dtype)

        change(folder, edit)
        check(folder, numbers)


def test_zeros_that_are_missing_are_not_guessed(folder: Path) -> None:
    write(folder, groups_of({**INT4, "symmetric": False}), compressed())
    with pytest.raises(BadModelFile, match="weight_zero_point is missing"):
        read_checkpoint(folder, "fp32")


def test_compressed_tensors_once_said_compression_config(folder: Path) -> None:
    path = folder / "config.json"
    numbers = change(folder, lambda tensors: quantise(tensors, compressed()))
    path.write_text(json.dumps({**json.loads(path.read_text()), "compression_config": groups_of(INT4)}))
    check(folder, numbers)
    assert is_quantised(folder)


@pytest.mark.parametrize(
    ("name", "shape"), [("self_attn.{}_scale", ()), ("self_attn.{}_proj.output_scale", (1,))]
)
def test_scales_of_the_cache_lie_beside_those_of_the_weights(
    folder: Path, name: str, shape: tuple[int, ...]
) -> None:
    said = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    numbers = write(folder, groups_of(said, kv_cache_scheme={"num_bits": 8}), fp8("weight_scale", "matrix"))

    def edit(tensors: Tensors) -> None:
        for layer in range(2):
            for part, scale in (("k", 0.5), ("v", 0.25)):
                tensors[f"model.layers.{layer}.{name.format(part)}"] = torch.full(shape, scale)

    change(folder, edit)
    check(folder, numbers)
    scales = read_checkpoint(folder, "fp32").kv_scales
    assert scales is not None
    assert scales.tolist() == [[[0.5, 0.5], [0.25, 0.25]]] * 2


def test_fp8_with_scales_of_activations(folder: Path) -> None:
    """There is a scale a matrix and one for its inputs, by the names of transformers' layer."""
    said = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    numbers = write(folder, said, fp8("weight_scale_inv", "matrix"))
    change(
        folder, lambda t: t.update({f"{matrix}.activation_scale": torch.tensor(0.1) for matrix in numbers})
    )
    check(folder, numbers)


@pytest.mark.parametrize(
    "quantization",
    [
        "gptq",
        ["gptq"],
        {**GPTQ, "bits": "four"},
        {**GPTQ, "bits": {"down": 4}},
        {**GPTQ, "group_size": "wide"},
        {**GPTQ, "dynamic": "-:"},
        {"quant_method": "awq", "bits": [4]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": ["128", "128"]},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 1}}},
        {"quant_method": "compressed-tensors", "sparsity_config": "dense"},
        groups_of({**INT4, "num_bits": None}),
        groups_of({**INT4, "num_bits": 8, "type": "float", "block_structure": "128x128"}),
    ],
)
def test_malformed_quantization_configs_are_refused(folder: Path, quantization: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    with pytest.raises(UnsupportedModel, match=r"quantization_config|config\.json"):
        is_quantised(folder)
    with pytest.raises(UnsupportedModel, match=r"quantization_config|config\.json"):
        read_checkpoint(folder, "fp32")


@pytest.mark.parametrize(
    "change_of_state", [{"blocksize": 0}, {"blocksize": -64}, {"shape": [-64, -128]}, {"nested_blocksize": 0}]
)
def test_bitsandbytes_states_of_size_zero_are_refused(folder: Path, change_of_state: dict[str, Any]) -> None:
    write(folder, {"load_in_4bit": True, "quant_method": "bitsandbytes"}, four_bit_places(nested=True))

    def edit(state: torch.Tensor) -> torch.Tensor:
        said = {**json.loads(bytes(state.tolist())), **change_of_state}
        return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    change(folder, every("weight.quant_state.bitsandbytes__nf4", edit))
    with pytest.raises(BadModelFile, match="not the state of a matrix"):
        read_checkpoint(folder, "fp32")


@pytest.mark.parametrize(
    ("quantization", "writer", "rows", "columns"),
    [
        (GPTQ, gptq(), 8, 48),
        (groups_of(INT4), compressed(), 3, 45),
        ({"load_in_4bit": True}, four_bit_places(nested=False), 2, 33),
        ({"load_in_4bit": True}, four_bit_places(nested=False), 2, 5),
        (
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
            fp8("weight_scale_inv", "rectangles"),
            40,
            50,
        ),
    ],
)
def test_the_last_group_may_be_shorter(
    quantization: dict[str, Any], writer: Writer, rows: int, columns: int
) -> None:
    torch.manual_seed(9)
    scheme, written = scheme_of({"quantization_config": quantization}), writer(rows, columns)
    assert scheme is not None
    read = scheme.read("m", Held({f"m.{part}": tensor for part, tensor in written.parts.items()}))
    assert torch.equal(read.numbers() if isinstance(read, Codes) else read, written.numbers)
