"""Quantised folders are read by shard: a rank touches the bytes of its own parts, whatever the scheme."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from diptych.engine.models.shape import BadModelFile, UnsupportedModel
from diptych.engine.parallel.parts import CUT_UNIT, deal_parts
from diptych.engine.parallel.stages import deal_stages
from diptych.engine.weights import gguf_file
from diptych.engine.weights.canonical import ExpertWeights, Matrix, Weights
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.gguf_header import GgufTensor
from diptych.engine.weights.part_weights import cut_of, read_parts
from diptych.engine.weights.quantised.region import Axis, Region
from diptych.engine.weights.reader import WHOLE, Cut, OpenCheckpoint
from kernels import packed_matrix, scaled_matrix
from kernels.byte_linear import ByteMatrix, quantise_matrix
from kernels.packed_matrix import PackedMatrix
from kernels.scaled_matrix import ScaledMatrix
from tests.diptych.engine.models import expert_gguf, expert_models
from tests.diptych.engine.models.family_models import text_of
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup, whole
from tests.diptych.engine.weights.quantised_folders import Tensors, change, declare, gptq, write
from tests.diptych.engine.weights.read_ranges import ReadRanges
from tests.diptych.engine.weights.test_quantised_folders import GPTQ, KINDS
from tests.forms import sampled

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
DEGREES = (1, 2, 3, 4)
MXFP4 = {"quant_method": "mxfp4"}
ORDERED = frozenset({"gptq, ordered", "int4, ordered"})
THREE_PARTS = frozenset({*ORDERED, "nf4", "nf4 with nested peaks", "awq, wide groups"})
"""Kinds of which four parts of this small model read more: 64 columns lie together, which are no whole parts,
or every part has columns of all groups.
"""


def plain(path: Path) -> Path:
    """Write one layer of 12 heads, 384 lanes, and as many inner numbers: four parts end at whole 32."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of full numbers."""
    return plain(tmp_path)


@pytest.fixture(
    scope="module", params=sampled(KINDS, KINDS.keys() - {"nf4 with nested peaks", "int4, ordered"})
)
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return a kind of quantisation and a folder of it."""
    path = plain(tmp_path_factory.mktemp("model"))
    write(path, *KINDS[request.param])
    return request.param, path


def parts_of(opened: OpenCheckpoint, count: int, unit: int = 1, **more: Any) -> list[tuple[Any, Weights]]:
    """Return each part and its weights, read as a rank of its own."""
    (stage,) = deal_stages(opened.shape, 1)
    parts = deal_parts(opened.shape, count, unit=unit, **more)
    return [(part, *read_parts(opened, [part], stage)) for part in parts]


def full(matrix: Matrix) -> torch.Tensor:
    """Return the numbers of a matrix of a GPU."""
    if isinstance(matrix, PackedMatrix):
        return packed_matrix.dequantise(matrix)
    if isinstance(matrix, ScaledMatrix):
        return scaled_matrix.dequantise(matrix)
    assert isinstance(matrix, torch.Tensor), type(matrix)
    return matrix


def cut_out(tensor: torch.Tensor, of: Cut) -> torch.Tensor:
    """Return a part of a tensor that was read whole."""
    if of.rows is not None:
        tensor = tensor[of.rows.start : of.rows.stop]
    return tensor if of.columns is None else tensor[:, of.columns.start : of.columns.stop]


def experts_of(experts: ExpertWeights | None) -> dict[str, tuple[Any, ...]]:
    """Return the tensors of a layer's experts that are dealt, by field."""
    found = {} if experts is None else vars(experts)
    return {name: value for name, value in found.items() if isinstance(value, tuple)}


def check_cuts(path: Path, precision: Any, count: int, unit: int = 1) -> None:
    """Compare all matrices of `count` parts with those that are read whole, as numbers."""
    opened = open_checkpoint(path, precision)
    everything = opened.read_all().weights
    for part, own in parts_of(opened, count, unit):
        for layer, all_of_it in zip(own.layers, everything.layers, strict=True):
            for field in MATRICES:
                matrix, expected = getattr(layer, field), getattr(all_of_it, field)
                if matrix is not None:
                    wanted = cut_out(full(expected), cut_of(field, part, opened.shape))
                    assert torch.equal(full(matrix), wanted), field
            for name, theirs in experts_of(all_of_it.experts).items():
                field = name.removesuffix("s").replace("_biase", "_bias")
                if not (ours := experts_of(layer.experts)[name]) and name == "down_biases":
                    continue  # the first part adds them
                for mine, its in zip(ours, theirs, strict=True):
                    wanted = cut_out(full(its), cut_of(f"experts.0.{field}", part, opened.shape))
                    assert torch.equal(full(mine), wanted), name


def check_reads(path: Path, ranges: ReadRanges, counts: tuple[int, ...], precision: Any = "fp32") -> None:
    """Count what each rank reads: its share of the file, and some bytes that all need."""
    size = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    opened = open_checkpoint(path, precision)
    ranges.take()
    (stage,) = deal_stages(opened.shape, 1)
    for count in counts:
        read = []
        for part in deal_parts(opened.shape, count):
            read_parts(opened, [part], stage)
            read.append(ranges.take())
        assert max(read) <= size / count * 1.1, (count, read, size)
        assert sum(read) <= size * 1.1, (count, read, size)


def test_parts_are_cuts_of_the_whole_and_a_rank_reads_its_share(
    quantised: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, path = quantised
    for count in DEGREES:
        check_cuts(path, "fp32", count)
    check_reads(path, ReadRanges(monkeypatch), DEGREES[:3] if kind in THREE_PARTS else DEGREES)


def test_parts_that_stay_quantised_stand_for_the_wholes_numbers(quantised: tuple[str, Path]) -> None:
    kind, path = quantised
    for count in DEGREES:
        if kind in ORDERED and count > 1:
            with pytest.raises(UnsupportedModel, match=r"o_proj: inputs in an order of their own \(act-"):
                check_cuts(path, "packed", count, CUT_UNIT)
        else:
            check_cuts(path, "packed", count, CUT_UNIT)


def test_a_border_that_is_off_by_one_group_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: scales of the next group."""
    write(folder, *KINDS["awq"])
    check_cuts(folder, "fp32", 2)
    right = Region.entries

    def off_by_one(region: Region, axis: Axis | None) -> slice:
        found = right(region, axis)
        if axis is None or (axis.along, axis.count) != ("columns", 32) or not found.start:
            return found
        return slice(found.start - 1, found.stop - 1)

    monkeypatch.setattr(Region, "entries", off_by_one)
    with pytest.raises((AssertionError, BadModelFile)):
        check_cuts(folder, "fp32", 2)


def test_a_matrix_that_is_read_whole_fails_the_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: nothing is cut in the file."""
    write(folder, *KINDS["gptq"])
    ranges = ReadRanges(monkeypatch)
    check_reads(folder, ranges, (2,))
    monkeypatch.setattr(Region, "around", lambda _, __, size: Region(range(size[0]), range(size[1])))
    with pytest.raises(AssertionError):
        check_reads(folder, ranges, (2,))


def test_fused_matrices_of_codes_are_read_by_their_own_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phi-3's: queries, keys and values in one tensor, gate and up in another."""
    torch.manual_seed(4)
    config = Phi3Config(
        vocab_size=96,
        hidden_size=384,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=12,
        num_key_value_heads=12,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write(folder, GPTQ, gptq())
    for count in (2, 3):
        check_cuts(folder, "fp32", count)
        check_cuts(folder, "packed", count, CUT_UNIT)
    check_reads(folder, ReadRanges(monkeypatch), (2, 3))


def gpt_oss_folder(folder: Path, *, codes: bool) -> Path:
    """Write a small gpt-oss whose experts have 64 inner numbers, in MXFP4 or in full."""
    config = copy.deepcopy(expert_models.CONFIGS["gpt_oss"])
    config.hidden_size = config.intermediate_size = 64
    expert_models.random_oracle(config, seed=1).save_pretrained(folder)
    if codes:
        declare(folder, MXFP4)
        change(folder, _in_mxfp4)
    return folder


def _in_mxfp4(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(120, 130, blocks.shape[:-1]).to(torch.uint8)


@pytest.mark.parametrize("codes", [True, False], ids=["mxfp4", "full"])
def test_experts_whose_gate_and_up_take_turns_are_read_by_shard(
    codes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gpt_oss_folder(tmp_path, codes=codes)
    for precision in ("fp32", *(("packed",) if codes else ())):
        check_cuts(folder, precision, 2, CUT_UNIT)
    check_reads(folder, ReadRanges(monkeypatch), (1, 2))


def test_keys_and_values_of_latents_in_gguf_files_are_read_by_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices that are made of others: of each head its own, keys transposed."""
    path = tmp_path / "model.gguf"
    expert_gguf.write(expert_models.oracle_of("deepseek_v3-plain"), path, "deepseek2")
    opened = open_checkpoint(path, "fp32")
    whole = {name: opened.read(f"layers.1.{name}") for name in ("k_b", "v")}
    read: list[tuple[str, int]] = []
    covering = gguf_file._covering

    def counted(tensor: GgufTensor, *of: Any) -> Any:
        found = covering(tensor, *of)
        read.append((tensor.name, found.tensor.data.nbytes))
        assert found.tensor.data.nbytes <= tensor.data.nbytes / 2, tensor.name
        return found

    monkeypatch.setattr(gguf_file, "_covering", counted)
    for part in deal_parts(opened.shape, 2):
        for name, matrix in whole.items():
            cut = cut_of(name, part, opened.shape)
            assert torch.equal(full(opened.read(f"layers.1.{name}", cut)), cut_out(full(matrix), cut))
    assert len(read) == 4


def test_packed_parts_of_a_gguf_file_stand_for_the_wholes_numbers(bundled_path: Path) -> None:
    opened = open_checkpoint(bundled_path, "packed")
    for field in MATRICES:
        name = f"layers.3.{field}"
        whole_matrix = full(opened.read(name))
        for part in deal_parts(opened.shape, 3, unit=CUT_UNIT):
            cut = cut_of(field, part, opened.shape)
            assert torch.equal(full(opened.read(name, cut)), cut_out(whole_matrix, cut)), field


def test_a_static_scale_of_inputs_goes_with_every_part(folder: Path) -> None:
    write(folder, *KINDS["fp8, one scale"])
    scale = torch.tensor(0.25)

    def with_scales(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight_scale")]:
            tensors[name.replace("weight_scale", "input_scale")] = scale.clone()

    change(folder, with_scales)
    for _, own in parts_of(open_checkpoint(folder, "packed"), 3, CUT_UNIT):
        for field in MATRICES:
            matrix = getattr(own.layers[0], field)
            assert isinstance(matrix, ScaledMatrix)
            assert matrix.static is not None
            assert float(matrix.static) == float(scale)


@pytest.mark.parametrize("precision", ["fp8", "w8a8"])
def test_full_numbers_are_rounded_part_by_part(folder: Path, precision: Any) -> None:
    """Scales are those of an output's numbers in the part: of all its inputs, or of the part's columns."""
    opened, plain = open_checkpoint(folder, precision), open_checkpoint(folder, "fp32")
    kind = {"fp8": scaled_matrix.FP8, "w8a8": scaled_matrix.INT8}[precision]
    pairs = zip(parts_of(opened, 3, CUT_UNIT), parts_of(plain, 3, CUT_UNIT), strict=True)
    for (_, rounded), (_, numbers) in pairs:
        for field in MATRICES:
            found = getattr(rounded.layers[0], field)
            expected = scaled_matrix.quantise(getattr(numbers.layers[0], field), kind)
            assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(found.scales, expected.scales)


def test_codes_are_rounded_to_bytes_part_by_part(folder: Path) -> None:
    """Precision int8, which `auto` takes for a folder where the CPU multiplies bytes."""
    write(folder, *KINDS["awq"])
    opened, plain = open_checkpoint(folder, "int8"), open_checkpoint(folder, "fp32")
    for (_, rounded), (_, numbers) in zip(parts_of(opened, 2), parts_of(plain, 2), strict=True):
        found, expected = rounded.layers[0].down, quantise_matrix(numbers.layers[0].down)
        assert isinstance(found, ByteMatrix)
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("kind", ["awq", "fp8, rectangles", "nf4"])
@pytest.mark.usefixtures("one_thread")
def test_every_degree_gives_the_bits_of_one_rank_with_the_same_parts(folder: Path, kind: str) -> None:
    """Full numbers, and packed codes made full in each rank, through the torch backend of parts."""
    write(folder, *KINDS[kind])
    text = text_of(40)
    for precision in ("fp32", "packed"):
        opened = _dequantised(open_checkpoint(folder, precision))
        logits = {}
        for ranks in (1, 2, 4):
            group = ThreadGroup(opened, 4, ranks)
            logits[ranks] = group.step(group.memory(), 0, [token % 96 for token in text], len(text))
        assert torch.equal(logits[2], logits[1])
        assert torch.equal(logits[4], logits[1])
        assert (logits[1] - whole(opened, [token % 96 for token in text])).abs().max() < 1e-4


def _dequantised(opened: OpenCheckpoint) -> OpenCheckpoint:
    """Return a checkpoint whose matrices are read as they stay, and given as full numbers in float32."""

    def read(name: str, cut: Cut = WHOLE) -> Matrix:
        return full(opened.read(name, cut)).float()

    return replace(opened, read=read)
