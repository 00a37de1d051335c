"""A layer's tensors as the reference backend multiplies them: dense, matrices of one input joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.engine.weights import LayerWeights, Matrix
from kernels import byte_codes, byte_linear, packed_matrix, quantised_linear, scaled_matrix
from kernels.byte_codes import CodedBytes
from kernels.byte_linear import ByteMatrix
from kernels.packed_matrix import PackedMatrix
from kernels.quantised_linear import BlockMatrix
from kernels.scaled_matrix import ScaledMatrix


@dataclass(frozen=True)
class FusedLayer:
    """A layer with its matrices joined: four products a layer instead of seven."""

    input_norm: torch.Tensor | None
    input_norm_bias: torch.Tensor | None
    qkv: torch.Tensor | None
    """None where attention is over latents (latent_attention.py), or where there is none."""
    qkv_bias: torch.Tensor | None
    q_gate: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    """Matrix without rows where the layer does not attend."""
    o_bias: torch.Tensor | None
    attention_out_norm: torch.Tensor | None
    post_norm: torch.Tensor | None
    post_norm_bias: torch.Tensor | None
    up: torch.Tensor | None
    """The gate's rows, if there is one, before those of up."""
    up_bias: torch.Tensor | None
    down: torch.Tensor | None
    down_bias: torch.Tensor | None
    feed_forward_out_norm: torch.Tensor | None


def fuse(layer: LayerWeights) -> FusedLayer:
    """Return the layer with its matrices dense and joined; experts have their own (experts.py)."""
    return FusedLayer(
        input_norm=layer.input_norm,
        input_norm_bias=layer.input_norm_bias,
        qkv=None if layer.latent_norm is not None else _qkv(layer),
        qkv_bias=_join(layer.q_bias, layer.k_bias, layer.v_bias),
        q_gate=None if layer.q_gate is None else dense(layer.q_gate),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=dense(layer.o),
        o_bias=layer.o_bias,
        attention_out_norm=layer.attention_out_norm,
        post_norm=layer.post_norm,
        post_norm_bias=layer.post_norm_bias,
        up=_join(*(dense(matrix) for matrix in (layer.gate, layer.up) if matrix is not None)),
        up_bias=_join(layer.gate_bias, layer.up_bias),
        down=None if layer.down is None else dense(layer.down),
        down_bias=layer.down_bias,
        feed_forward_out_norm=layer.feed_forward_out_norm,
    )


def _qkv(layer: LayerWeights) -> torch.Tensor | None:
    """Return queries', keys' and values' rows joined; None where the layer does not attend."""
    if not layer.q.shape[0]:
        return None
    return _join(dense(layer.q), dense(layer.k), dense(layer.v))


def dense(matrix: Matrix) -> torch.Tensor:
    """Return the full numbers of a matrix."""
    match matrix:
        case BlockMatrix():
            return quantised_linear.dequantise(matrix)
        case ByteMatrix():
            return byte_linear.dequantise(matrix)
        case CodedBytes():
            return byte_linear.dequantise(byte_codes.as_bytes(matrix))
        case PackedMatrix():
            return packed_matrix.dequantise(matrix)
        case ScaledMatrix():
            return scaled_matrix.dequantise(matrix)
        case _:
            return matrix


def _join(*parts: torch.Tensor | None) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
