"""Parts of Qwen's encoders: patches, attention turned by their places, the joining of squares into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from diptych.engine.vision.encoder import EncoderTensors
from kernels.rotary import rotary

EPS = 1e-6
"""Addend of the encoders' norms."""
FRAMES = 2
"""Frames of video that a patch has."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias of a layer; or cos and sin."""


@dataclass(frozen=True)
class Attention:
    """Attention of one layer."""

    heads: int
    qkv: Pair
    out: Pair

    @classmethod
    def read(cls, tensors: EncoderTensors, at: str, hidden: int, heads: int) -> Attention:
        """Read the attention of the layer whose names begin with `at`."""
        qkv = tensors.pair(f"{at}attn.qkv", 3 * hidden, hidden)
        return cls(heads, qkv, tensors.pair(f"{at}attn.proj", hidden, hidden))

    def __call__(self, x_PH: torch.Tensor, turns: Pair, lengths: Sequence[int]) -> torch.Tensor:
        """Return what attention adds, `[P, H]`: stretches of `lengths` patches attend each to itself."""
        patches, hidden = x_PH.shape
        joined = functional.linear(x_PH, *self.qkv).view(patches, 3, self.heads, -1)
        q, k, v = joined.unbind(1)
        q, k = (rotary(part.float(), *turns).to(x_PH.dtype) for part in (q, k))
        stretches = (part.transpose(0, 1).split(list(lengths), dim=1) for part in (q, k, v))
        mixed = [
            functional.scaled_dot_product_attention(*(part[None] for part in one))[0]
            for one in zip(*stretches, strict=True)
        ]
        whole = torch.cat(mixed, dim=1).transpose(0, 1).reshape(patches, hidden)
        return functional.linear(whole, *self.out)


def read_kernel(tensors: EncoderTensors, hidden: int, patch: int) -> torch.Tensor:
    """Read the kernel of video's patches and return it as `[H, 3, patch, patch]`: an image is the same in all
    frames.
    """
    return tensors.take("patch_embed.proj.weight", hidden, 3, FRAMES, patch, patch).sum(dim=2)


@dataclass(frozen=True)
class Merger:
    """Two linear layers that make a row of embeddings of each square."""

    first: Pair
    second: Pair

    def __call__(self, normed_SH: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[S, text hidden]` of squares whose patches are joined, normed."""
        return functional.linear(functional.gelu(functional.linear(normed_SH, *self.first)), *self.second)
