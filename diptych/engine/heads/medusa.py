"""Medusa heads: each guesses, from one hidden row, the token so many places on (Cai et al., 2024,
arXiv:2401.10774).

Row t behind the final norm is what the model's own head samples token t + 1 from; head k guesses token
t + 2 + k from the same row. A head is residual blocks, x + silu(W x + b), and a matrix to the vocabulary. The
published files are a folder with config.json (`medusa_num_heads`, `medusa_num_layers`) and
medusa_lm_head.safetensors with `K.L.linear.weight`, `K.L.linear.bias` of block L of head K, and
`K.LAYERS.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from diptych.engine.heads.head_files import BadHeads, read_config

HEADS_FIELD: Final = "medusa_num_heads"
"""Field of config.json by which such a folder is known."""
WEIGHTS: Final = "medusa_lm_head.safetensors"
PICKLED: Final = "medusa_lm_head.pt"
_NAME: Final = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


@dataclass(frozen=True)
class MedusaHead:
    """Weights of a head."""

    blocks: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    """Weight `[hidden, hidden]` and bias `[hidden]` of each residual block."""
    output: torch.Tensor
    """`[vocab, hidden]`."""


class MedusaHeads:
    """The heads of a model, computed in torch."""

    def __init__(self, heads: Sequence[MedusaHead]) -> None:
        """Take at least one head; all are of one type and size."""
        self._heads = heads

    def __len__(self) -> int:
        return len(self._heads)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        matrices = (block for head in self._heads for block in head.blocks)
        blocks = sum(part.nbytes for block in matrices for part in block if part is not None)
        return blocks + sum(head.output.nbytes for head in self._heads)

    def logits(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """Return float32 logits `[count, rows, vocab]` of the first heads after `hidden [rows, H]`."""
        with torch.inference_mode():
            return torch.stack([_logits(head, hidden) for head in self._heads[:count]])


def _logits(head: MedusaHead, hidden: torch.Tensor) -> torch.Tensor:
    x = hidden.to(head.output.dtype)
    for weight, bias in head.blocks:
        x = x + functional.silu(functional.linear(x, weight, bias))
    return functional.linear(x, head.output).float()


def is_medusa(path: Path) -> bool:
    """Return whether a folder's config.json is that of Medusa heads."""
    try:
        return HEADS_FIELD in read_config(path)
    except BadHeads:
        return False


def read_medusa(path: Path, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> MedusaHeads:
    """Read the heads of a model of `hidden_size` and `vocab_size` in `dtype`. Raises BadHeads."""
    config = read_config(path)
    wanted, layers = config.get(HEADS_FIELD), config.get("medusa_num_layers", 1)
    if not isinstance(wanted, int) or not isinstance(layers, int) or wanted < 1 or layers < 0:
        raise BadHeads(f"{path / 'config.json'}: {HEADS_FIELD} {wanted}, medusa_num_layers {layers}")
    tensors = _tensors(path)
    count = 1 + max((int(match[1]) for name in tensors if (match := _NAME.fullmatch(name))), default=-1)
    if count < wanted:
        raise BadHeads(f"{path / WEIGHTS} has {count} heads, its config.json says {wanted}")
    return MedusaHeads(
        [_head(path, tensors, k, layers, (hidden_size, vocab_size), dtype) for k in range(count)]
    )


def _head(
    path: Path,
    tensors: dict[str, torch.Tensor],
    head: int,
    layers: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
) -> MedusaHead:
    hidden, vocab = sizes

    def read(name: str, size: tuple[int, ...], optional: bool = False) -> torch.Tensor | None:
        tensor = tensors.get(name, tensors.get(f"medusa_head.{name}"))
        if tensor is None and optional:
            return None
        if tensor is None:
            raise BadHeads(f"{path / WEIGHTS} lacks {name}")
        if tuple(tensor.shape) != size:
            raise BadHeads(
                f"{path / WEIGHTS}: {name} is of {_by(tensor.shape)}, for this model it would be "
                f"{_by(size)}: these are the heads of another model"
            )
        if not tensor.isfinite().all():
            raise BadHeads(f"{path / WEIGHTS}: {name} has numbers that are not finite")
        return tensor.to(dtype).contiguous()

    blocks, output = [], read(f"{head}.{layers}.weight", (vocab, hidden))
    for layer in range(layers):
        weight = read(f"{head}.{layer}.linear.weight", (hidden, hidden))
        assert weight is not None
        blocks.append((weight, read(f"{head}.{layer}.linear.bias", (hidden,), optional=True)))
    assert output is not None
    return MedusaHead(blocks, output)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    file = path / WEIGHTS
    if not file.is_file() and (path / PICKLED).is_file():
        raise BadHeads(
            f"{path / PICKLED} is a pickle, which can run code and is never read: convert it to {WEIGHTS} "
            "(torch.load, then safetensors.torch.save_file)"
        )
    if not file.is_file():
        raise BadHeads(f"{path} has no {WEIGHTS}")
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadHeads(f"{file} is broken or incomplete, no safetensors file: get it again") from error


def _by(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))
