"""Weights from a GGUF file (the format of llama.cpp), dequantised or in the file's own blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from diptych.engine.dtype import PLAIN, Precision
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.weights.block_quantised import (
    blocks_in_precision,
    in_precision,
    is_matrix,
    kept_format,
    kept_together,
    multiplied_together,
)
from diptych.engine.weights.canonical import BadModelFile, Checkpoint, Matrix, assemble
from diptych.engine.weights.gguf_header import GgufTensor, read_header
from diptych.engine.weights.gguf_shape import shape_from_header
from diptych.engine.weights.unexpected_tensors import refuse_unexpected_tensors
from kernels.quantised_linear import BlockMatrix, dequantise

_MODEL_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER_NAMES = {
    "input_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER_PREFIX = "blk."
_INTERLEAVED = ("llama", "mistral")
"""Architectures whose q and k rows llama.cpp reorders so that its rotation pairs neighbouring lanes."""


def has_quantised_matrices(path: Path) -> bool:
    """Return whether any matrix of the layers is in blocks of fewer than 16 bits a number. Raises
    BadModelFile.
    """
    layers = (tensor for name, tensor in read_header(path).tensors.items() if name.startswith(_LAYER_PREFIX))
    return any(gguf.GGML_QUANT_SIZES[tensor.kind][0] > 1 for tensor in layers)


def read_gguf(path: Path, precision: Precision) -> Checkpoint:
    """Read a GGUF file. Raises UnsupportedModel (the message names what) or BadModelFile."""
    header = read_header(path)
    tensors = header.tensors
    factors = _dequantised(tensors[_ROPE_FACTORS]).flatten().tolist() if _ROPE_FACTORS in tensors else None
    shape = shape_from_header(header, factors)
    refuse_unexpected_tensors(filter(_only_shape_decides, tensors), shape, _LAYER_PREFIX, _LAYER_NAMES)

    def find(name: str) -> GgufTensor:
        stored = _stored_name("embed" if name == "head" and shape.tied_embeddings else name)
        if stored not in tensors:
            raise BadModelFile(f"tensor {stored} is missing")
        return tensors[stored]

    def read(name: str) -> Matrix:
        tensor = find(name)
        if precision not in PLAIN and is_matrix(name):
            joined = [find(other) for other in multiplied_together(name)]
            kept = kept_format(tensor.kind)
            rows = (one.shape[0] for one in joined)
            if kept is not None and kept_together(name, {one.kind for one in joined}, rows):
                data = torch.from_numpy(np.array(tensor.data))
                blocks = BlockMatrix(kept, tensor.shape[-1], _canonical_order(name, data, shape))
                if (found := blocks_in_precision(blocks, precision)) is not None:
                    return found
        return in_precision(name, _canonical_order(name, _dequantised(tensor), shape), precision)

    own_head = not shape.tied_embeddings or precision not in PLAIN
    return Checkpoint(shape, assemble(shape, read, own_head=own_head))


def _only_shape_decides(name: str) -> bool:
    """Return whether only the shape can say that a tensor is read. Old converters left the angles of each
    layer.
    """
    return name not in {*_MODEL_NAMES.values(), _ROPE_FACTORS} and ".attn_rot_embd" not in name


def _stored_name(name: str) -> str:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, layer, field = name.split(".")
    return f"{_LAYER_PREFIX}{layer}.{_LAYER_NAMES[field]}"


def _dequantised(tensor: GgufTensor) -> torch.Tensor:
    kept = kept_format(tensor.kind)
    if kept is not None:  # the same numbers, in a tenth of the time
        rows = torch.from_numpy(np.array(tensor.data)).view(-1, tensor.data.shape[-1])
        return dequantise(BlockMatrix(kept, tensor.shape[-1], rows)).view(tensor.shape)
    try:
        values = gguf.quants.dequantize(np.asarray(tensor.data), tensor.kind)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModel(f"tensor {tensor.name}: {error}") from error
    # A float32 tensor comes back as a read-only view of the file.
    return torch.from_numpy(np.array(values, dtype=np.float32, copy=not values.flags.writeable))


def _canonical_order(name: str, tensor: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Undo llama.cpp's interleaving of the rotated rows; other tensors are as they should be."""
    field = name.rsplit(".", 1)[-1]
    if shape.family not in _INTERLEAVED or field not in ("q", "k", "q_bias", "k_bias"):
        return tensor
    heads = shape.num_heads if field.startswith("q") else shape.num_kv_heads
    if tensor.shape[0] != heads * shape.head_dim:
        raise BadModelFile(f"tensor {_stored_name(name)} is {tuple(tensor.shape)}")
    pairs = tensor.reshape(heads, shape.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
