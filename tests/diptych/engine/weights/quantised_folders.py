"""Quantised folders written word by word, as their formats say, beside the numbers that they stand for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.engine.weights.quantised.region import Axis
from kernels.quantised_linear import GROUP

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output lies at each place of a word


@dataclass(frozen=True)
class Quantised:
    """Quantised matrix: its tensors by last name, and its numbers, float32 `[out, in]`."""

    parts: Tensors
    numbers: torch.Tensor


class Held(dict[str, torch.Tensor]):
    """Tensors of a matrix by name, read whole; implements the reader's `Tensors`."""

    region = None

    def has(self, name: str) -> bool:
        return name in self

    def size(self, name: str) -> tuple[int, ...]:
        """Return the size of a tensor."""
        return tuple(self[name].shape)

    def read(
        self, name: str, *axes: Axis | None, viewed: tuple[int, int] | None = None, as_bytes: bool = False
    ) -> torch.Tensor:
        """Return a tensor, in another size if that is asked for."""
        if viewed is None:
            return self[name]
        flat = self[name].flatten()
        return (flat.view(torch.uint8) if as_bytes else flat)[: math.prod(viewed)].view(viewed)


Writer = Callable[[int, int], Quantised]
"""Of a random matrix of so many outputs and inputs."""


def words(numbers: Sequence[int], bits: int) -> list[int]:
    """Whole numbers in words of 32 bits, the first one lowest, as int32 has them."""
    packed = []
    for begin in range(0, len(numbers), 32 // bits):
        word = sum(n << bits * place for place, n in enumerate(numbers[begin : begin + 32 // bits]))
        packed.append(word - (1 << 32) if word >= 1 << 31 else word)
    return packed


def packed_rows(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack each row of whole numbers by itself."""
    return torch.tensor([words(row, bits) for row in matrix.tolist()], dtype=torch.int32)


def drawn(rows: int, columns: int, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes `[rows, columns]`, scales and zeros `[rows, groups]`; every code and zero may come."""
    groups = -(-columns // group)
    codes = torch.randint(0, 1 << bits, (rows, columns))
    scales = (torch.rand(rows, groups) * 0.02 + 0.001).half()
    return codes, scales, torch.randint(0, 1 << bits, (rows, groups))


def number(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, of: Sequence[int]) -> torch.Tensor:
    """Column i is of group `of[i]`."""
    columns = [(codes[:, i] - zeros[:, g]).float() * scales[:, g].float() for i, g in enumerate(of)]
    return torch.stack(columns, dim=1)


def gptq(*, bits: int = 4, group: int = GROUP, version: int = 1, ordered: bool = False) -> Writer:
    def write(rows: int, columns: int) -> Quantised:
        width = group if group > 0 else columns
        codes, scales, zeros = drawn(rows, columns, width, bits)
        of = (torch.arange(columns) // width)[torch.randperm(columns) if ordered else torch.arange(columns)]
        qzeros = packed_rows(zeros.T, bits)
        if version == 1:
            qzeros -= torch.tensor(words([1] * (32 // bits), bits), dtype=torch.int32)  # with borrows
        parts = {
            "qweight": packed_rows(codes, bits).T.contiguous(),
            "qzeros": qzeros,
            "scales": scales.T.contiguous(),
            "g_idx": of.to(torch.int32),
        }
        return Quantised(parts, number(codes, scales, zeros, of.tolist()))

    return write


def awq(*, group: int = GROUP) -> Writer:
    def in_order(matrix: torch.Tensor) -> torch.Tensor:
        """Outputs along the rows, shuffled within each eight."""
        return matrix.view(len(matrix), -1, 8)[..., list(AWQ_ORDER)].flatten(1)

    def write(rows: int, columns: int) -> Quantised:
        codes, scales, zeros = drawn(rows, columns, group, 4)
        parts = {
            "qweight": packed_rows(in_order(codes.T), 4),
            "qzeros": packed_rows(in_order(zeros.T), 4),
            "scales": scales.T.contiguous(),
        }
        return Quantised(parts, number(codes, scales, zeros, [i // group for i in range(columns)]))

    return write


def compressed(
    *, bits: int = 4, group: int = GROUP, zeros: bool = False, ordered: bool = False, packed: bool = True
) -> Writer:
    def write(rows: int, columns: int) -> Quantised:
        width = group if group > 0 else columns
        codes, scales, drawn_zeros = drawn(rows, columns, width, bits)
        half = 1 << bits - 1
        used = drawn_zeros if zeros else torch.full_like(drawn_zeros, half)
        order = torch.randperm(columns) if ordered else torch.arange(columns)
        of = (torch.arange(columns) // width)[order]
        parts: Tensors = {"weight_scale": scales}
        if packed:
            parts["weight_packed"] = packed_rows(codes, bits)
            parts["weight_shape"] = torch.tensor([rows, columns])
        else:
            parts["weight"] = (codes - half).to(torch.int8)
        if zeros:
            signed = (drawn_zeros - half).to(torch.int8)
            parts["weight_zero_point"] = packed_rows(drawn_zeros.T, bits).T.contiguous() if packed else signed
        if ordered:
            parts["weight_g_idx"] = of.to(torch.int32)
        return Quantised(parts, number(codes, scales, used, of.tolist()))

    return write


def fp8(scale_name: str, scales: str) -> Writer:
    """`scales`: "matrix", "outputs" or "rectangles", of 32 by 32."""

    def write(rows: int, columns: int) -> Quantised:
        weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        shapes = {"matrix": (1,), "outputs": (rows, 1), "rectangles": (-(-rows // 32), -(-columns // 32))}
        scale = torch.rand(shapes[scales]) * 0.05 + 0.01
        of_each = scale if scales != "rectangles" else torch.kron(scale, torch.ones(32, 32))[:rows, :columns]
        return Quantised({"weight": weight, scale_name: scale}, weight.float() * of_each)

    return write


def four_bit_places(*, nested: bool) -> Writer:
    """bitsandbytes' four bits: places in a map, blocks of 64 numbers in a row; `nested`: peaks in bytes."""

    def write(rows: int, columns: int) -> Quantised:
        places = torch.randn(16).sort().values
        codes = torch.randint(0, 16, (rows * columns,))
        blocks = -(-rows * columns // 64)
        parts: Tensors = {
            "weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            "weight.quant_map": places,
        }
        state: dict[str, Any] = {"shape": [rows, columns], "blocksize": 64, "quant_type": "nf4"}
        if nested:
            bytes_of_peaks = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
            byte_places, of_blocks = torch.rand(256), torch.rand(-(-blocks // 256)) * 0.1
            parts |= {"weight.nested_quant_map": byte_places, "weight.nested_absmax": of_blocks}
            state |= {"nested_blocksize": 256, "nested_offset": 0.125}
            peaks = torch.stack(
                [byte_places[byte] * of_blocks[i // 256] for i, byte in enumerate(bytes_of_peaks.tolist())]
            )
            parts["weight.absmax"], peaks = bytes_of_peaks, peaks + 0.125
        else:
            parts["weight.absmax"] = peaks = torch.rand(blocks) * 0.1
        said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts["weight.quant_state.bitsandbytes__nf4"] = said
        numbers = torch.stack([places[code] * peaks[i // 64] for i, code in enumerate(codes.tolist())])
        return Quantised(parts, numbers.view(rows, columns))

    return write


def bytes_of_rows(rows: int, columns: int) -> Quantised:
    """LLM.int8()."""
    weight, peaks = torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows) * 0.1 + 0.01
    parts = {"weight": weight, "SCB": peaks, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    numbers = [row.float() * (peak / 127) for row, peak in zip(weight, peaks, strict=True)]
    return Quantised(parts, torch.stack(numbers))


def quantise(tensors: Tensors, write: Writer, keep: Sequence[str] = ()) -> Mapping[str, torch.Tensor]:
    """Replace every projection of a plain folder's tensors, save those of which a word of `keep` is part.

    Gives the numbers of each matrix, quantised or not.
    """
    numbers = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        matrix = name.removesuffix(".weight")
        if any(word in name for word in keep):
            numbers[matrix] = tensors[name].float()
            continue
        plain = tensors.pop(name)
        quantised = write(*plain.shape)
        tensors |= {f"{matrix}.{part}": tensor for part, tensor in quantised.parts.items()}
        numbers[matrix] = quantised.numbers
    return numbers


def groups_of(weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


def plain_folder(path: Path) -> Path:
    """Write a small random Llama of full numbers."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96 + 32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def change(folder: Path, edit: Callable[[Tensors], Any]) -> Any:
    """Edit the folder's tensors; gives what `edit` does."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    result = edit(tensors)
    save_file(tensors, path, {"format": "pt"})
    return result


def declare(folder: Path, quantization: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def write(
    folder: Path, quantization: Mapping[str, Any], writer: Writer, keep: Sequence[str] = ()
) -> Mapping[str, torch.Tensor]:
    """Quantise a plain folder and declare it; gives the numbers of each matrix by the file's name."""
    declare(folder, quantization)
    numbers: Mapping[str, torch.Tensor] = change(folder, lambda tensors: quantise(tensors, writer, keep))
    return numbers


def matrices(folder: Path, precision: Any) -> dict[str, Any]:
    """Return the matrices as read, by the file's names."""
    found = {}
    for number, layer in enumerate(read_checkpoint(folder, precision).weights.layers):
        for field in ("q", "k", "v", "o"):
            found[f"model.layers.{number}.self_attn.{field}_proj"] = getattr(layer, field)
        for field in ("gate", "up", "down"):
            found[f"model.layers.{number}.mlp.{field}_proj"] = getattr(layer, field)
    return found
