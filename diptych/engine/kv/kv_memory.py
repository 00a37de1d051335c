"""The memory that holds keys and values, in blocks of tokens.

Block-major: one block is one contiguous region over all layers, so that a handoff moves (or grants) one
region per block whatever the depth of the model. Inside it, per layer and KV head, keys lie transposed
`[head_dim, block_size]` (the lanes of a dot product over the head are tokens, so a score kernel reads them
contiguously) and values lie `[block_size, head_dim]`. In int8 a scale a token follows each of the two
(kernels/int8_cache.py). A model with latent attention keeps one vector a token
and layer for all its heads, keys and values: `[block_size, width]`.

Where a draft model computes beside the model, each block has a second segment after the model's own: the
draft model's keys and values of the same tokens. What grants, copies, sends or digests a block knows whole
blocks only; each of the two models sees its own segment as a memory of its own.

Who allocates the bytes is not decided here: the heap, a memfd, another process' memfd are all just a buffer,
and the memory of a GPU, this process' or one mapped from another, is just a tensor.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from diptych.engine.kv.state_layout import StateLayout
from diptych.engine.kv.window_groups import WindowGroups
from kernels import int8_cache
from kernels.kv_blocks import head_numbers, token_views

LAYOUT_NAME = "block-major/k-transposed/1"
LATENT_LAYOUT_NAME = "block-major/latent/1"
SCALED_LAYOUT_NAME = "block-major/k-transposed/token-scales/1"
SEGMENT_BYTES = 64
"""Segments begin at multiples of it: whole cache lines, and whole numbers of any type."""


@dataclass(frozen=True)
class KVLayout:
    """Layout of one block. Two processes may share blocks only if their layouts are equal."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""
    dtype: torch.dtype
    latent: bool = False
    """True if a token keeps one vector of `head_dim` numbers for keys and values; `num_kv_heads` is 1 then
    (kernels/latent_attention.py).
    """
    draft: KVLayout | None = None
    """Layout of the draft model's segment of each block; None: a block is this model's alone."""
    windows: WindowGroups | None = None
    """Groups of layers that lie in blocks of their own; None: a block has all layers."""
    states: StateLayout | None = None
    """Pages of recurrent states; `windows` says which blocks of a place they are then. None: no layer is
    recurrent.
    """
    foreign_bytes: int = 0
    """Bytes at the end of each block that mean nothing here: a draft model's segment, in the pool of a worker
    with another one.
    """

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1")
        if self.latent and self.has_scales:
            raise ValueError("latents are not kept in int8")
        if self.latent and self.num_kv_heads != 1:
            raise ValueError("latents are kept once for all heads: num_kv_heads must be 1")
        if self.draft is not None and (self.draft.block_size, self.draft.draft) != (self.block_size, None):
            raise ValueError("the draft model's segment has blocks of as many tokens, and no further segment")
        if self.foreign_bytes and self.draft is not None:
            raise ValueError("blocks have a draft model's segment, or bytes of another one's")
        if self.windows is not None and (self.latent or self.draft is not None):
            raise ValueError("blocks of latents, and those with a draft model's segment, have all layers")
        if self.states is not None and (self.windows is None or self.windows.tables != self.states.blocks):
            raise ValueError("pages of recurrent states are the blocks of a place beside its full one")

    @property
    def name(self) -> str:
        """The arrangement inside a block; changes when its meaning changes."""
        name = LATENT_LAYOUT_NAME if self.latent else SCALED_LAYOUT_NAME if self.has_scales else LAYOUT_NAME
        if self.windows is None:
            return name
        if self.states is not None:
            return f"{name}/states-1/{self.windows.slots}/{self.states.page_bytes}"
        return f"{name}/window-{self.windows.window}/{self.windows.slots}"

    @property
    def has_scales(self) -> bool:
        """True if blocks hold a scale for each token and head: those of int8 do."""
        return self.dtype == int8_cache.DTYPE

    @property
    def block_layers(self) -> int:
        """Layers whose keys and values lie in one block."""
        return self.num_layers if self.windows is None else self.windows.slots

    @property
    def blocks_per_place(self) -> int:
        """Blocks that `block_size` tokens take while all layers read them."""
        return 1 if self.windows is None else self.windows.blocks_per_place

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """`(layers, 2 (keys, values), KV heads, head_dim * block_size)`; of latents 1 instead of 2, in int8
        with the bytes of the scales beside the last.
        """
        numbers = head_numbers(self.dtype, self.head_dim, self.block_size)
        return (self.block_layers, 1 if self.latent else 2, self.num_kv_heads, numbers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all its layers, the draft model's included."""
        if self.draft is None:
            return self.own_bytes + self.foreign_bytes
        return self.draft_offset + -(-self.draft.own_bytes // SEGMENT_BYTES) * SEGMENT_BYTES

    @property
    def own_bytes(self) -> int:
        """Bytes of this model's keys and values in a block."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def draft_offset(self) -> int:
        """Bytes from the beginning of a block to the draft model's segment."""
        return -(-self.own_bytes // SEGMENT_BYTES) * SEGMENT_BYTES

    def without_draft(self) -> KVLayout:
        """Return the layout of blocks that are this model's alone."""
        return replace(self, draft=None)

    def in_blocks_of(self, size: int) -> KVLayout:
        """Return the layout of this model's own segments in blocks of `size` bytes, whose rest is foreign.

        Raises ValueError for blocks that are too small, or in which numbers would not be aligned.
        """
        foreign = size - self.own_bytes
        if foreign < 0 or (foreign and size % SEGMENT_BYTES):
            raise ValueError(f"blocks of {size} bytes do not begin with {self.own_bytes} of this model's")
        return replace(self, draft=None, foreign_bytes=foreign)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def prompt_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the blocks that a prompt of `num_tokens` tokens takes while it is computed in chunks of up
        to `chunk`, those of its windowed layers included.
        """
        places = self.blocks_for(num_tokens)
        if self.windows is None:
            return places
        return places + self.windows.ring_blocks(places, chunk, self.block_size)


class SpreadBlocks(Protocol):
    """Blocks of which other processes hold shares, in memories of their own. Any thread may call."""

    def gather_block(self, block: int) -> memoryview:
        """Return the bytes of a whole block. It waits for the other processes."""
        ...

    def scatter_block(self, block: int, payload: memoryview) -> None:
        """Write the bytes of a whole block, each share where it is held, before any later step reads it."""
        ...

    def copy_block(self, src: int, dst: int) -> None:
        """Copy all of block `src` over block `dst`, before any later step."""
        ...

    def await_writes(self) -> None:
        """Wait until every process has written and copied what was ordered until now."""
        ...

    def without_draft(self) -> SpreadBlocks:
        """Return what reads and writes the model's own segments of the same blocks as blocks."""
        ...


class KVMemory:
    """`num_blocks` blocks of one layout over one writable buffer, or over memory of a device.

    The buffer stays exported while this object lives: an mmap given here can be closed only after it.
    """

    layout: KVLayout
    num_blocks: int
    data: torch.Tensor
    """The model's keys and values, `[num_blocks, *block_shape]`, in the buffer."""
    blocks: torch.Tensor
    """Whole blocks as uint8 `[num_blocks, bytes]`, in the buffer: what transports move."""
    draft: KVMemory | None
    """The draft model's segments of the same blocks, if the layout has them."""
    spread: SpreadBlocks | None = None
    """Reader and writer of whole blocks where this process holds shares of them only; None: it holds all."""
    origin: tuple[int, int] = (0, 0)
    """Layer and KV head of `layout` at which `data` begins, where the memory has room for a share only."""
    _bytes: memoryview | None
    """None on a device: the host has no address of these bytes."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, buffer: mmap.mmap | memoryview | None = None
    ) -> None:
        """Lay blocks over `buffer`, or over fresh zeroed memory of this process when there is none.

        Raises ValueError if the buffer is read-only or smaller than the blocks need.
        """
        size = _size(layout, num_blocks)
        if buffer is None:
            # An anonymous mapping is zeroed lazily by the kernel: a pool of gigabytes costs only what is
            # touched.
            buffer = mmap.mmap(-1, size)
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise ValueError("the buffer of a KV memory must be writable")
        if view.nbytes < size:
            raise ValueError(f"the buffer holds {view.nbytes} bytes, {num_blocks} blocks need {size}")
        self._bytes = view[:size]
        self._lay(layout, num_blocks, torch.frombuffer(self._bytes, dtype=torch.uint8))

    @classmethod
    def on_device(cls, layout: KVLayout, num_blocks: int, device: torch.device | str) -> KVMemory:
        """Allocate zeroed blocks in one allocation of `device`.

        Zeroed, so that bytes which another process left there cannot be read. Raises torch.OutOfMemoryError.
        """
        flat = torch.zeros(_size(layout, num_blocks), dtype=torch.uint8, device=device)
        if flat.is_cuda:  # steps on another stream would be zeroed after they have written
            torch.cuda.current_stream(flat.device).synchronize()
        return cls.over_tensor(layout, num_blocks, flat)

    @classmethod
    def over_tensor(cls, layout: KVLayout, num_blocks: int, flat: torch.Tensor) -> KVMemory:
        """Lay blocks over the bytes `flat`, a contiguous uint8 tensor on any device, which stays alive.

        Raises ValueError if it is smaller than the blocks need.
        """
        size = _size(layout, num_blocks)
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError("a KV memory lies over a flat contiguous tensor of bytes")
        if flat.numel() < size:
            raise ValueError(f"the tensor holds {flat.numel()} bytes, {num_blocks} blocks need {size}")
        memory = cls.__new__(cls)
        memory._bytes = None
        memory._lay(layout, num_blocks, flat[:size])
        return memory

    def as_share_of(self, layout: KVLayout, layer: int, head: int) -> KVMemory:
        """Return the same memory as a share of blocks of `layout`, which begins at a layer and a KV head.

        `data` and `blocks` stay the share's own, and so does the draft model's segment, of which there is no
        share. Whole blocks are read and written by `spread`, which is the caller's to set.
        """
        share = KVMemory.__new__(KVMemory)
        share._bytes, share.draft, share.origin = None, self.draft, (layer, head)
        share.layout, share.num_blocks = layout, self.num_blocks
        share.data, share.blocks = self.data, self.blocks
        return share

    def _lay(self, layout: KVLayout, num_blocks: int, flat: torch.Tensor) -> None:
        self._lay_segment(layout, flat.view(num_blocks, -1), 0)
        self.draft = None
        if layout.draft is not None:
            self.draft = KVMemory.__new__(KVMemory)
            self.draft._bytes = None
            self.draft.draft = None
            self.draft._lay_segment(layout.draft, self.blocks, layout.draft_offset)

    def _lay_segment(self, layout: KVLayout, blocks: torch.Tensor, offset: int) -> None:
        """Lay `layout` over the bytes from `offset` on of each of `blocks`."""
        self.layout = layout
        self.num_blocks = len(blocks)
        self.blocks = blocks
        own = blocks[:, offset : offset + layout.own_bytes].view(layout.dtype)
        data = own.unflatten(1, layout.block_shape)
        # Of one block torch makes a stride of its own up, and what is recorded over one serves any number.
        strides = (self.stride_bytes // layout.dtype.itemsize, *data.stride()[1:])
        self.data = data.as_strided(data.shape, strides)

    def without_draft(self) -> KVMemory:
        """Return the model's own segments as blocks, over the same bytes; itself if they have no other."""
        if self.draft is None:
            return self
        if self.spread is not None:
            share = self.as_share_of(self.layout.without_draft(), *self.origin)
            share.draft, share.spread = None, self.spread.without_draft()
            return share
        own = KVMemory.__new__(KVMemory)
        own._bytes, own.draft = None, None
        own._lay_segment(self.layout.without_draft(), self.blocks[:, : self.layout.own_bytes], 0)
        return own

    @property
    def address(self) -> int:
        """Address of block 0 in this process, or on its device."""
        return self.data.data_ptr()

    @property
    def stride_bytes(self) -> int:
        """Bytes from one block to the next."""
        return self.blocks.stride(0)

    @property
    def device(self) -> torch.device:
        """Device of the blocks."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks together."""
        return self.blocks.nbytes

    def block_bytes(self, block: int) -> memoryview:
        """Return the writable bytes of one block.

        Raises IndexError for a block that is not there, RuntimeError for memory that the host cannot reach.
        """
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} of {self.num_blocks}")
        if self._bytes is None:
            raise RuntimeError(f"the bytes of a block on {self.device} cannot be reached from the host")
        size = self.layout.bytes_per_block
        return self._bytes[block * size : (block + 1) * size]

    def copy_block(self, src: int, dst: int) -> None:
        """Copy all of block `src` over block `dst` (the copy of copy-on-write).

        On a device it is queued on the caller's current stream, as steps are, and so ordered with them.
        Raises IndexError for a block that is not there.
        """
        if self.spread is not None:
            self.spread.copy_block(src, dst)
            return
        if self._bytes is not None:
            self.block_bytes(dst)[:] = self.block_bytes(src)
            return
        for block in (src, dst):
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"block {block} of {self.num_blocks}")
        self.blocks[dst].copy_(self.blocks[src])

    def move_lanes(self, table: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of one sequence from lane to lane, one after the other.

        `moves` are pairs of a lane and the one to copy it to; lane p lies in block `table[p // block_size]`.
        The draft model's segment stays as it is. Raises ValueError for latents.
        """
        layout = self.layout
        if layout.latent:
            raise ValueError("lanes of latents are not moved")
        size = layout.block_size
        views = token_views(self.data, layout.head_dim)
        for src, dst in moves:
            here, there = table[src // size], table[dst // size]
            for view in views:
                view[there, :, :, dst % size] = view[here, :, :, src % size]


def _size(layout: KVLayout, num_blocks: int) -> int:
    """Bytes of so many blocks. Raises ValueError for none."""
    if num_blocks < 1:
        raise ValueError("a KV memory needs at least one block")
    return layout.bytes_per_block * num_blocks
