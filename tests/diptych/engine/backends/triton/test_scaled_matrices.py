"""FP8 and int8 on the GPU step: what folders say of inputs is followed, and the text is the meaning's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_weights import pack
from diptych.engine.backends.triton.products import scaled_mm
from diptych.engine.backends.triton.products.experts import PackedExpertProduct
from diptych.engine.backends.triton.products.make import INPUT_ROUNDING, quantised_product
from diptych.engine.backends.triton.products.packed import PackedLinear
from diptych.engine.backends.triton.products.scaled import ScaledLinear
from diptych.engine.dtype import Precision
from diptych.engine.gpu_precision import describe_matrices, packs_on_gpu
from diptych.engine.models.shape import ExpertsShape, LayerShape, UnsupportedModel
from diptych.engine.weights import BadModelFile
from diptych.engine.weights.block_quantised import in_precision
from diptych.engine.weights.checkpoint import read_checkpoint
from kernels import packed_matrix, scaled_matrix
from kernels.packed_matrix import PackedMatrix
from kernels.scaled_matrix import FP8, INT8, ScaledMatrix, quantise
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.weights.quantised_folders import (
    Writer,
    change,
    compressed,
    fp8,
    groups_of,
    matrices,
    plain_folder,
    write,
)
from tests.diptych.engine.weights.quantised_folders import quantise as quantise_folder
from tests.diptych.engine.weights.test_quantised_folders import FLOAT8, KINDS
from tests.diptych.engine.weights.test_quantised_folders import INT8 as INT8_WEIGHTS
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of, with_matrices

CPU = torch.device("cpu")
DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def with_inputs(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors that says how inputs are rounded."""
    config = groups_of(weights)
    config["config_groups"]["group_0"]["input_activations"] = inputs
    return config


FOLDERS: dict[str, tuple[Mapping[str, Any], Writer, str]] = {
    "float8, inputs too": (
        with_inputs(FLOAT8, DYNAMIC), fp8("weight_scale", "outputs"),
        "14 in FP8 and inputs too, a scale for each output; 1 in bfloat16",
    ),
    "float8, weights only": (
        groups_of(FLOAT8), fp8("weight_scale", "outputs"),
        "14 in FP8, a scale for each output; 1 in bfloat16",
    ),
    "int8, inputs too": (
        with_inputs(INT8_WEIGHTS, {**DYNAMIC, "type": "int"}), compressed(bits=8, group=-1, packed=False),
        "14 in 8-bit codes and inputs too, a scale for each output; 1 in bfloat16",
    ),
    "int8 with inputs of other bits": (
        with_inputs(INT8_WEIGHTS, {**DYNAMIC, "type": "int", "num_bits": 4}),
        compressed(bits=8, group=-1, packed=False),
        "14 in 8-bit codes, a scale for each output; 1 in bfloat16",
    ),
    "fp8, one scale": (
        *KINDS["fp8, one scale"], "14 in FP8 and inputs too, a scale for each output; 1 in bfloat16",
    ),
    "fp8, small rectangles": (*KINDS["fp8, rectangles"], "14 in FP8, groups of 32; 1 in bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_keep_their_numbers_and_what_they_say_of_inputs(tmp_path: Path, name: str) -> None:
    config, writer, described = FOLDERS[name]
    numbers = write(plain_folder(tmp_path), config, writer)
    assert packs_on_gpu(tmp_path)
    for matrix, found in matrices(tmp_path, "packed").items():
        module = packed_matrix if isinstance(found, PackedMatrix) else scaled_matrix
        assert torch.equal(module.dequantise(found), numbers[matrix])
    assert describe_matrices(read_checkpoint(tmp_path, "packed").weights, CPU) == described


def test_modelopts_fp8_has_a_scale_for_all_inputs_of_a_matrix(tmp_path: Path) -> None:
    """Read a folder as older exports are: the config says nothing, a file of ModelOpt's own does."""
    plain_folder(tmp_path)
    numbers = change(tmp_path, lambda tensors: quantise_folder(tensors, fp8("weight_scale", "matrix")))
    scales = {f"{name}.input_scale": torch.tensor(0.01 * (i + 1)) for i, name in enumerate(numbers)}
    change(tmp_path, lambda tensors: tensors.update(scales))
    record = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(record))
    assert packs_on_gpu(tmp_path)
    for name, found in matrices(tmp_path, "packed").items():
        assert isinstance(found, ScaledMatrix)
        assert torch.equal(scaled_matrix.dequantise(found), numbers[name])
        assert found.static is not None
        assert found.static.item() == scales[f"{name}.input_scale"].item()
    assert torch.equal(matrices(tmp_path, "fp32")[name], numbers[name])
    change(tmp_path, lambda tensors: tensors.update({f"{name}.input_scale": torch.tensor(-1.0)}))
    with pytest.raises(BadModelFile, match=r"input_scale is not a positive number"):
        matrices(tmp_path, "packed")


def tokens_by(folder: Path, precision: Any, operators: Operators | None, count: int = 4) -> list[int]:
    """Greedy tokens of the model in `precision`."""
    found = read_checkpoint(folder, precision)
    backend = TritonBackend(found.shape, found.weights, "cpu", operators)
    layout = layout_of(found.shape, 16, torch.bfloat16)
    sequence, tokens, out = Pool(layout, 6).sequence(60), tokens_of(20, vocab_size=96), []
    for _ in range(count):
        tokens = [int(backend.forward([sequence.step(tokens)], None).argmax())]
        out += tokens
    return out


@pytest.mark.parametrize(("dtype", "most"), [(FP8, 0.04), (INT8, 0.005)])
def test_steps_are_near_those_of_the_same_numbers_with_inputs_as_they_are(
    dtype: torch.dtype, most: float
) -> None:
    """Random weights with few likely tokens show rounding ten times as much as a trained model does."""
    shape = shape_of(hidden_size=104, intermediate_size=152)
    dense = weights_of(shape, torch.float32)

    def distance(change: Callable[[ScaledMatrix], ScaledMatrix]) -> float:
        rounded = with_matrices(dense, lambda _, matrix: change(quantise(matrix, dtype)))
        numbers = with_matrices(dense, lambda _, matrix: scaled_matrix.dequantise(quantise(matrix, dtype)))
        layout, tokens = layout_of(shape, 16, torch.float32), tokens_of(20)
        got, expected = (
            backend.forward([Pool(layout, 3).sequence(20).step(tokens)], None).log_softmax(-1)
            for backend in (
                TritonBackend(shape, rounded, "cpu", REFERENCE_OPERATORS),
                TorchBackend(shape, numbers),
            )
        )
        return float((expected.exp() * (expected - got)).sum())

    assert 0 < distance(lambda matrix: matrix) < most
    assert distance(lambda matrix: replace(matrix, scales=matrix.scales.roll(1, 0))) > 10 * most


def test_matrices_that_are_quantised_already_are_not_rounded_again(tmp_path: Path) -> None:
    write(plain_folder(tmp_path), *KINDS["awq"])
    with pytest.raises(UnsupportedModel, match="dtype fp8 rounds full numbers; this folder is quantised"):
        read_checkpoint(tmp_path, "fp8")


def test_the_library_s_product_is_taken_for_many_rows_if_it_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = scaled_mm.find_product(CPU, squares=False)
    assert product is not None, "torch multiplies FP8 on the CPU"
    matrix = quantise(torch.randn(48, 64), FP8)
    linear, x = ScaledLinear(matrix, torch.randn(48).bfloat16()), torch.randn(20, 64).bfloat16()
    expected = scaled_matrix.scaled_linear(x, matrix, linear.bias)
    operators = replace(REFERENCE_OPERATORS, scaled_linear=_never)
    for out in (torch.empty(20, 48), torch.empty(20, 48).bfloat16(), torch.empty(20, 60).bfloat16()[:, 3:51]):
        got = linear.multiply(operators, x, None, out=out)
        assert got.data_ptr() == out.data_ptr()
        assert (got.float() - expected).norm() / expected.norm() < 0.01

    def wrong(*parts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return product(*parts, out=out).mul_(1.1)

    def missing(*parts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this card has none")

    for one in (wrong, missing):
        monkeypatch.setattr(scaled_mm, "_rows_out", one)
        monkeypatch.setattr(scaled_mm, "_rows", one)
        scaled_mm.find_product.cache_clear()
        assert scaled_mm.find_product(CPU, squares=False) is None
    scaled_mm.find_product.cache_clear()


def _never(*given: object, **how: object) -> torch.Tensor:
    raise AssertionError("the library multiplies")


@pytest.mark.parametrize("names", [("_rows_out", "_rows"), ("_blocks_out", "_blocks")])
def test_both_names_of_the_library_s_product_mean_the_same(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    squares = names[0] == "_blocks_out"
    x, x_scales = scaled_matrix.round_rows(torch.randn(32, 256), FP8, squares=squares)
    matrix = _squares(128, 256) if squares else quantise(torch.randn(48, 256), FP8)
    scales = scaled_mm.library_scales(matrix)
    if squares:  # the CPU's library has none: what stands for it takes the card's layout
        monkeypatch.setattr(torch, "_scaled_mm_v2", _blocks_of_the_card)
    outs = [torch.empty(32, matrix.shape[0], dtype=torch.bfloat16) for _ in names]
    for name, out in zip(names, outs, strict=True):
        getattr(scaled_mm, name)(x, scaled_mm._by_group(x_scales), matrix.values, scales, out=out)
    assert torch.equal(*outs)
    expected = scaled_matrix.product_of_rounded(x, x_scales, matrix)
    assert (outs[0].float() - expected).norm() / expected.norm() < 0.01


def test_squares_are_the_library_s_where_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that checks the layout of scales as CUDA's does finds what it asks for."""
    scaled_mm.find_product.cache_clear()
    assert scaled_mm.find_product(CPU, squares=True) is None, "torch has no squares on the CPU"
    scaled_mm.find_product.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm_v2", _blocks_of_the_card)
    operators = replace(
        REFERENCE_OPERATORS,
        scaled_linear=_never,
        round_rows=lambda x, dtype, squares, static: (
            (found := scaled_matrix.round_rows(x, dtype, squares=squares))[0], scaled_mm._by_group(found[1])
        ),
    )  # fmt: skip
    matrix, x = _squares(256, 640), torch.randn(33, 640).bfloat16()
    out = torch.empty(33, 256, dtype=torch.bfloat16)
    ScaledLinear(matrix, None).multiply(operators, x, None, out=out)
    expected = scaled_matrix.scaled_linear(x, matrix)
    assert (out.float() - expected).norm() / expected.norm() < 0.01
    scaled_mm.find_product.cache_clear()
    assert not scaled_mm.fits(_squares(192, 640)), "outputs are whole squares"


def _squares(rows: int, columns: int) -> ScaledMatrix:
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1
    return ScaledMatrix(torch.randn(rows, columns).to(FP8), scales, squares=True)


def _blocks_of_the_card(
    x: torch.Tensor, matrix: torch.Tensor, x_scales: list[torch.Tensor], x_kinds: list[int],
    x_swizzles: list[int], scales: list[torch.Tensor], kinds: list[int], *rest: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply over squares as torch does on Hopper: it refuses scales in another layout."""
    rows, groups = len(x), x.shape[1] // 128
    scaling = torch.nn.functional.ScalingType
    assert (x_kinds, kinds) == ([scaling.BlockWise1x128.value], [scaling.BlockWise128x128.value])
    assert x_scales[0].shape == (rows, groups)
    assert x_scales[0].stride() == (1, -(-rows // 4) * 4)
    padded = -(-groups // 4) * 4
    assert scales[0].shape == (padded, matrix.shape[1] // 128)
    assert scales[0].stride() == (1, padded)
    weight = ScaledMatrix(matrix.t(), scales[0][:groups].t().contiguous(), squares=True)
    found = scaled_matrix.product_of_rounded(x, x_scales[0], weight).bfloat16()
    return found if out is None else out.copy_(found)


def test_a_card_without_fp8_multiplies_inputs_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = quantise(torch.randn(48, 64), FP8)
    assert isinstance(quantised_product(CPU, [(matrix, None)]), ScaledLinear)
    monkeypatch.setattr("diptych.engine.backends.triton.products.make.has_fp8", lambda device: False)
    product = quantised_product(CPU, [(matrix, None)])
    assert isinstance(product, PackedLinear)
    assert torch.equal(packed_matrix.dequantise(product.weight), scaled_matrix.dequantise(matrix))
    whole = quantise(torch.randn(48, 64), INT8)
    assert isinstance(quantised_product(CPU, [(whole, None)]), ScaledLinear)


@pytest.mark.parametrize(("dtype", "name"), [(FP8, "FP8"), (INT8, "8-bit codes")])
def test_no_inputs_are_rounded_where_that_is_off(
    dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(hidden_size=128, intermediate_size=128)
    weights = with_matrices(weights_of(shape, torch.bfloat16), lambda _, matrix: quantise(matrix, dtype))
    for asked, kind in (("auto", ScaledLinear), ("off", PackedLinear)):
        monkeypatch.setenv(INPUT_ROUNDING, asked)
        assert isinstance(pack(weights, CPU).layers[0].qkv, kind)
    assert f"{name}, inputs not rounded: DIPTYCH_INPUT_ROUNDING=off" in describe_matrices(weights, CPU)
    monkeypatch.setenv(INPUT_ROUNDING, "8")
    with pytest.raises(UnsupportedModel, match="DIPTYCH_INPUT_ROUNDING is '8': it must be auto or off"):
        pack(weights, CPU)


def test_steps_with_the_kernels_are_those_of_the_meaning(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    from kernels.gpu.launch import INTERPRETED

    if not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 was not set before Triton was imported")
    plain_folder(tmp_path)
    assert tokens_by(tmp_path, "fp8", None, 2) == tokens_by(tmp_path, "fp8", REFERENCE_OPERATORS, 2)


def test_the_output_matrix_stays_full_numbers() -> None:
    numbers = torch.randn(8, 16)
    for name in ("head", "embed"):
        found = in_precision(name, numbers, "fp8")
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.bfloat16
    assert isinstance(in_precision("layers.0.shared.gate", numbers, "fp8"), ScaledMatrix)


@pytest.mark.parametrize(("precision", "kind"), [("fp8", "FP8"), ("w8a8", "8-bit codes")])
def test_experts_of_full_numbers_are_rounded_and_kept_in_codes(precision: Precision, kind: str) -> None:
    experts = ExpertsShape(5, 2, 64)
    shape = shape_of(hidden_size=64, experts=experts, layers=(LayerShape(experts=True),) * 2)
    full = weights_of(shape, torch.bfloat16)
    rounded = with_matrices(full, lambda _, one: in_precision("layers.0.experts.3.gate", one, precision))
    assert f"30 of experts in {kind}, a scale for each output" in describe_matrices(rounded, CPU)
    packed = pack(rounded, CPU).layers[1].experts
    assert packed is not None
    assert isinstance(packed.down, PackedExpertProduct)
    assert packed.down.nbytes < 5 * 64 * 64 * 1.1
    layout, tokens = layout_of(shape, 16, torch.bfloat16), tokens_of(20)
    got, expected, other = (
        TritonBackend(shape, weights, "cpu", REFERENCE_OPERATORS)
        .forward([Pool(layout, 3).sequence(20).step(tokens)], None)
        .log_softmax(-1)
        for weights in (rounded, full, weights_of(shape, torch.bfloat16, seed=6))
    )
    assert 0 < (got - expected).norm() < 0.3 * (other - expected).norm()


def test_norms_and_activations_round_what_no_adapter_reads() -> None:
    """Count launches: without adapters only the output product's inputs are rounded alone; no bit changes."""
    shape = shape_of()
    weights = with_matrices(weights_of(shape, torch.bfloat16), lambda _, matrix: quantise(matrix, FP8))
    launched: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        def run(*given: Any, **how: Any) -> Any:
            launched[name] += 1
            return getattr(REFERENCE_OPERATORS, name)(*given, **how)

        return run

    names, layers = ("round_rows", "norm_round", "swiglu_round"), shape.num_layers
    operators = replace(REFERENCE_OPERATORS, **{name: counting(name) for name in names})
    backend = TritonBackend(shape, weights, "cpu", operators)
    backend.allow_adapters(1, 4)
    backend.set_adapter(0, None)
    layout, tokens, logits = layout_of(shape, 16, torch.bfloat16), tokens_of(20), []
    for slot, expected in (
        (None, {"round_rows": layers, "norm_round": 2 * layers, "swiglu_round": layers}),
        (0, {"round_rows": 4 * layers}),  # a slot without an adapter changes no number
    ):
        launched.clear()
        step = replace(Pool(layout, 3).sequence(20).step(tokens), adapter=slot)
        logits.append(backend.forward([step], None))
        assert launched == expected
    assert torch.equal(*logits)
    launched.clear()
    few = [Pool(layout, 3).sequence(20).step(tokens[:count]) for count in (7, 9)]
    backend.forward(few, None)
    assert not launched, "sixteen rows are multiplied as they are"
    one_order = replace(operators, invariant_linear=lambda x, w, b=None, out=None: x @ w.T)
    product = ScaledLinear(quantise(torch.randn(8, 16), FP8), None)
    assert [product.rounds(operators, rows) for rows in (16, 17)] == [False, True]
    assert not product.rounds(one_order, 17), "they would be rounded in a chunk and not when decoded"
    assert ScaledLinear(quantise(torch.randn(8, 16), INT8), None).rounds(one_order, 1)
