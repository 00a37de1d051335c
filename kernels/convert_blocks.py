"""Conversion of a sequence's keys and values between memories of different layouts.

Another block size, another order of axes, another part of the KV heads. A memory is seen through `KVView`:
strided tensors whose axes have one meaning whatever lies where, so that a layout is its strides, and
converting is index arithmetic. Its digest is over logical places, so that both ends find the same, however
each arranges its blocks: a token's numbers of one head are summed, each times an odd number of its column,
and the sum is mixed with the place and the binding as a word of kernels/copy_blocks.py is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.copy_blocks import FIRST, GOLDEN, mixed, signed

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Whole numbers as wide as the numbers of a cache: bits are moved, whatever they mean."""


@dataclass(frozen=True)
class KVView:
    """A KV memory: keys and values `[blocks, layers, kv_heads, lanes, head_dim]`, views with any strides."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.keys.shape[3]


@dataclass(frozen=True)
class HeadRange:
    """KV heads that two ranks have in common: where they begin on each side, and how many there are."""

    source: int
    target: int
    count: int


def block_major(blocks: torch.Tensor, head_dim: int) -> KVView:
    """View `blocks [num_blocks, layers, 2, kv_heads, head_dim * size]`, the layout of
    kernels/paged_attention.py.
    """
    count, layers, _, heads, width = blocks.shape
    keys = blocks[:, :, 0].view(count, layers, heads, head_dim, width // head_dim).transpose(-1, -2)
    return KVView(keys, blocks[:, :, 1].view(count, layers, heads, width // head_dim, head_dim))


def token_major(blocks: torch.Tensor) -> KVView:
    """View `blocks [num_blocks, layers, 2, size, kv_heads, head_dim]`: each token's heads are neighbours."""
    keys, values = blocks.transpose(3, 4).unbind(2)
    return KVView(keys, values)


def common_heads(kv_heads: int, source: tuple[int, int], target: tuple[int, int]) -> HeadRange | None:
    """Return the heads that a rank of one tensor-parallel group has for a rank of another; each is (rank,
    ranks).

    Heads are dealt in order, as many to each rank. None where the two have nothing in common. Raises
    ValueError where the heads cannot be dealt so.
    """
    begins, ends = [], []
    for rank, ranks in (source, target):
        if kv_heads % ranks or not 0 <= rank < ranks:
            raise ValueError(f"{kv_heads} KV heads are not dealt to rank {rank} of {ranks}")
        begins.append(rank * (kv_heads // ranks))
        ends.append((rank + 1) * (kv_heads // ranks))
    begin, end = max(begins), min(ends)
    return HeadRange(begin - begins[0], begin - begins[1], end - begin) if begin < end else None


def convert_blocks(
    source: KVView,
    source_ids: torch.Tensor,
    target: KVView,
    target_ids: torch.Tensor,
    heads: HeadRange,
    tokens: int,
) -> None:
    """Copy positions 0 to `tokens` of one sequence from its blocks `source_ids` to its blocks `target_ids`
    (integers, each as many as cover them), of all layers, of the KV heads in `heads`.

    Raises ValueError for memories of other layers, head_dim or dtype, heads that are not there, and tables
    that are too short.
    """
    check(source, source_ids, target, target_ids, heads, tokens)
    bits = _gathered(source, source_ids, heads.source, heads.count, tokens)
    at = torch.arange(tokens, device=source.keys.device)
    ids, lanes = target_ids.long()[at // target.block_size], at % target.block_size
    own = slice(heads.target, heads.target + heads.count)
    for part, numbers in zip((target.keys, target.values), bits, strict=True):
        part.view(BITS[part.element_size()])[:, :, own][ids, :, :, lanes] = numbers


def logical_digests(
    view: KVView,
    ids: torch.Tensor,
    first_head: int,
    heads: int,
    tokens: int,
    *,
    unit: int,
    binding: torch.Tensor,
) -> torch.Tensor:
    """Return int64 `[ceil(tokens / unit)]`: a digest of every `unit` tokens of a sequence.

    `unit` is the block size of one of the two ends; `ids [n]` are the sequence's blocks; `binding [n]` is
    that of `kernels.copy_blocks.bind`.
    """
    parts = torch.stack(
        _gathered(view, ids, first_head, heads, tokens), dim=2
    )  # [tokens, layers, 2, heads, dims]
    at = torch.arange(tokens, device=ids.device)
    planes = torch.arange(parts[0, ..., 0].numel(), device=ids.device).view(parts.shape[1:4])
    sums = ((parts.long() & ((1 << 8 * parts.element_size()) - 1)) * _weights(parts)).sum(-1)
    places = planes[None] * unit + (at % unit).view(-1, 1, 1, 1) + 1
    bound = binding[at // unit].view(-1, 1, 1, 1)
    found = mixed(sums ^ (bound + places * signed(GOLDEN))).flatten(1).sum(dim=1)
    return torch.zeros_like(binding).index_add_(0, at // unit, found)


def _weights(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 `[columns]`: what each column of `numbers [..., columns]` is multiplied by.

    They are odd: a number that changed changes the sum, whatever it was.
    """
    keyed = (torch.arange(numbers.shape[-1], device=numbers.device) + 1) * signed(GOLDEN)
    return ((keyed ^ ((keyed >> 32) & 0xFFFFFFFF)) * signed(FIRST)) | 1


def check(
    source: KVView,
    source_ids: torch.Tensor,
    target: KVView,
    target_ids: torch.Tensor,
    heads: HeadRange,
    tokens: int,
) -> None:
    """Raise ValueError for what `convert_blocks` refuses."""
    kinds = [(v.keys.shape[1], v.keys.shape[4], v.keys.dtype) for v in (source, target)]
    if kinds[0] != kinds[1]:
        ours, theirs = (f"{layers} layers of {dim} x {dtype}" for layers, dim, dtype in kinds)
        raise ValueError(f"{ours} are not {theirs}")
    for name, view, ids, first in (
        ("source", source, source_ids, heads.source),
        ("target", target, target_ids, heads.target),
    ):
        if first < 0 or first + heads.count > view.keys.shape[2]:
            raise ValueError(f"{heads.count} heads from {first} reach beyond those of the {name}")
        if len(ids) * view.block_size < tokens:
            raise ValueError(f"{tokens} tokens do not fit into {len(ids)} blocks of the {name}")


def _gathered(
    view: KVView, ids: torch.Tensor, first_head: int, heads: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a sequence as whole numbers, `[tokens, layers, heads, head_dim]` each."""
    at = torch.arange(tokens, device=ids.device)
    blocks, lanes = ids.long()[at // view.block_size], at % view.block_size
    own = slice(first_head, first_head + heads)
    keys, values = (
        part.view(BITS[part.element_size()])[:, :, own][blocks, :, :, lanes]
        for part in (view.keys, view.values)
    )
    return keys, values
