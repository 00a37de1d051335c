"""Weights are read by shard: of every file only the rows and columns that a rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.engine.models.shape import BadModelFile, UnsupportedModel
from diptych.engine.parallel.parts import Part, deal_parts, parts_of_rank
from diptych.engine.parallel.stages import Stage, deal_stages
from diptych.engine.parallel_model import Dealing, open_parts
from diptych.engine.weights import gguf_file, safetensors_folder
from diptych.engine.weights.canonical import LayerWeights, Weights
from diptych.engine.weights.checkpoint import open_checkpoint, read_checkpoint
from diptych.engine.weights.gguf_header import GgufTensor
from diptych.engine.weights.part_weights import cut_of, read_parts, weight_bytes
from diptych.engine.weights.reader import Cut, OpenCheckpoint
from kernels.byte_codes import CodedBytes, as_bytes
from kernels.byte_linear import ByteMatrix, quantise_matrix
from tests.diptych.engine.models.family_models import config_of, oracle_of, save
from tests.diptych.engine.weights.quantised_folders import awq, plain_folder, write


def cut(tensor: torch.Tensor, of: object) -> torch.Tensor:
    rows, columns = (getattr(of, name) for name in ("rows", "columns"))
    if rows is not None:
        tensor = tensor[rows.start : rows.stop]
    return tensor if columns is None else tensor[:, columns.start : columns.stop]


def whole_model(opened: OpenCheckpoint) -> Stage:
    (stage,) = deal_stages(opened.shape, 1)
    return stage


def check_parts_are_cut_from(whole: Weights, path: Path, parts: int) -> None:
    opened = open_checkpoint(path, "fp32")
    dealt = deal_parts(opened.shape, parts)
    for part, own in zip(dealt, read_parts(opened, dealt, whole_model(opened)), strict=True):
        assert torch.equal(own.embed, whole.embed[part.vocab.start : part.vocab.stop])
        for layer, all_of_it in zip(own.layers, whole.layers, strict=True):
            for field, tensor in vars(layer).items():
                if tensor is not None:
                    expected = cut(getattr(all_of_it, field), cut_of(field, part, opened.shape))
                    assert torch.equal(tensor, expected), field


@pytest.mark.parametrize("case", ["seed-oss", "phi3-longrope", "glm4", "starcoder2"])
def test_a_folders_parts_are_cuts_of_the_whole(case: str, tmp_path: Path) -> None:
    """Biases, fused matrices and reordered lanes included."""
    folder = save(oracle_of(config_of(case)), tmp_path)
    check_parts_are_cut_from(read_checkpoint(folder, "fp32").weights, folder, 4)


def test_a_gguf_files_parts_are_cuts_of_the_whole(bundled_path: Path) -> None:
    """Quantised rows and columns, whose blocks of 32 the parts cut through."""
    opened = open_checkpoint(bundled_path, "fp32")
    parts = deal_parts(opened.shape, 7)
    for field in ("q", "k", "v", "o", "gate", "up", "down"):
        name = f"layers.29.{field}"
        whole = opened.read(name)
        for part in parts:
            of = cut_of(field, part, opened.shape)
            assert torch.equal(opened.read(name, of), cut(whole, of)), field
    rows = Cut(rows=parts[3].vocab)
    assert torch.equal(opened.read("embed", rows), cut(opened.read("embed"), rows))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "F16", "F32"])
def test_columns_are_cut_through_blocks_of_any_size(kind: str) -> None:
    of = gguf.GGMLQuantizationType[kind]
    count, size = gguf.GGML_QUANT_SIZES[of]
    data = np.random.default_rng(5).integers(0, 60, (6, 768 // count * size), dtype=np.uint8)
    tensor = GgufTensor("t", (6, 768), of, data)
    whole = gguf_file.dequantised(tensor)
    for columns in (range(768), range(1, 2), range(255, 513), range(300, 768)):
        found = gguf_file._read_cut(tensor, torch.tensor([4, 2, 3, 5]), Cut(range(1, 3), columns))
        expected = whole[[2, 3], columns.start : columns.stop]
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_a_rank_reads_no_more_than_its_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors that are read are norms; all else comes in slices, whose bytes are counted."""
    folder = save(oracle_of(config_of("seed-oss")), tmp_path)
    sizes: list[int] = []
    files = safetensors_folder.TensorFiles
    read, read_slice = files.read, files.read_slice

    def spied(self: object, name: str, *rest: object) -> torch.Tensor:
        tensor = read(self, name, *rest)  # type: ignore[arg-type]
        assert "norm" in name, name
        return tensor

    def counted(self: object, *what: object) -> torch.Tensor:
        tensor = read_slice(self, *what)  # type: ignore[arg-type]
        sizes.append(tensor.nbytes)
        return tensor

    opened = open_checkpoint(folder, "fp32")
    everything = weight_bytes([opened.read_all().weights])
    monkeypatch.setattr(files, "read", spied)
    monkeypatch.setattr(files, "read_slice", counted)
    parts = deal_parts(opened.shape, 3)
    own = read_parts(opened, [parts[number] for number in parts_of_rank(3, 1, 3)], whole_model(opened))
    assert sum(sizes) <= weight_bytes(own) <= everything / 3 * 1.1


@pytest.mark.parametrize(
    ("parts", "ranks"), [(2, 2), *(pytest.param(*more, marks=pytest.mark.full) for more in ((3, 3), (6, 3)))]
)
def test_no_rank_of_the_bundled_model_holds_a_tenth_more_than_its_share(
    bundled_path: Path, parts: int, ranks: int
) -> None:
    opened = open_checkpoint(bundled_path, "bf16")
    everything = weight_bytes([read_checkpoint(bundled_path, "bf16").weights])
    dealt = deal_parts(opened.shape, parts)
    held = [
        weight_bytes(
            read_parts(opened, [dealt[n] for n in parts_of_rank(parts, rank, ranks)], whole_model(opened))
        )
        for rank in range(ranks)
    ]
    assert max(held) <= everything / ranks * 1.1
    assert sum(held) >= everything


def test_a_quantised_folders_parts_are_cuts_of_the_whole(tmp_path: Path) -> None:
    """Matrices of codes are read whole and made full numbers, of which a part is kept."""
    folder = plain_folder(tmp_path)
    quantisation = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    write(folder, quantisation, awq())
    check_parts_are_cut_from(read_checkpoint(folder, "fp32").weights, folder, 2)
    with pytest.raises(UnsupportedModel, match="dtype gguf is not computed in parts"):
        open_parts(folder, "gguf", Dealing(2))
    opened = open_checkpoint(folder, "int8")
    with pytest.raises(UnsupportedModel, match="that stay quantised are not read in parts"):
        read_parts(opened, deal_parts(opened.shape, 2), whole_model(opened))


def layers_of(opened: OpenCheckpoint, parts: Sequence[Part]) -> list[LayerWeights]:
    """Return the first layer of each of some parts."""
    stage = Stage(range(1), opened.shape.num_layers)
    return [part.layers[0] for part in read_parts(opened, parts, stage)]


def test_codes_are_those_of_the_file_with_slopes_of_each_parts_own_numbers(bundled_path: Path) -> None:
    """Q4_1. Segments of columns begin where a part does; rows are those of the whole matrix."""
    opened, plain = open_checkpoint(bundled_path, "int8"), open_checkpoint(bundled_path, "fp32")
    parts, whole = deal_parts(opened.shape, 2), opened.read("layers.0.q")
    assert isinstance(whole, CodedBytes)
    layers = layers_of(opened, parts)
    for field in ("codes", "slopes", "scales"):
        joined = torch.cat([getattr(layer.q, field) for layer in layers])
        assert torch.equal(joined, getattr(whole, field))
    for layer, numbers in zip(layers, layers_of(plain, parts), strict=True):
        for field in ("o", "down"):
            found, rounded = getattr(layer, field), quantise_matrix(getattr(numbers, field))
            assert isinstance(found, CodedBytes)
            assert torch.equal(found.scales, rounded.scales)
            assert (as_bytes(found).values.int() - rounded.values).abs().max() <= 1


def test_columns_that_cut_through_blocks_are_rounded_from_a_parts_own_numbers(bundled_path: Path) -> None:
    opened, plain = open_checkpoint(bundled_path, "int8"), open_checkpoint(bundled_path, "fp32")
    parts = deal_parts(opened.shape, 7)[:2]
    assert parts[0].inner.stop % 32
    for layer, numbers in zip(layers_of(opened, parts), layers_of(plain, parts), strict=True):
        assert isinstance(layer.down, ByteMatrix)
        assert isinstance(layer.gate, CodedBytes)
        assert isinstance(numbers.down, torch.Tensor)
        rounded = quantise_matrix(numbers.down)
        assert torch.equal(layer.down.values, rounded.values)
        assert torch.equal(layer.down.scales, rounded.scales)


def test_a_folder_whose_tensor_is_too_small_is_refused(tmp_path: Path) -> None:
    folder = save(oracle_of(config_of("seed-oss")), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"][:, :-3]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    opened = open_checkpoint(folder, "fp32")
    with pytest.raises(BadModelFile, match=r"layers.1.mlp.down_proj.weight is .*: it has no columns"):
        read_parts(opened, deal_parts(opened.shape, 2), whole_model(opened))
