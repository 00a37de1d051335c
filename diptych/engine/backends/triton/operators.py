"""The operators that a step on a GPU is made of: the Triton kernels, or anything that means the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Operator = Callable[..., torch.Tensor]


class TritonUnavailable(RuntimeError):
    """The kernels cannot be had in this installation; the message says why."""


@dataclass(frozen=True)
class Operators:
    """Operators with the signatures of their namesakes in kernels/gpu."""

    paged_decode: Operator
    paged_prefill: Operator
    rms_norm: Operator
    add_rms_norm: Operator
    sum_parts: Operator
    sum_parts_rms_norm: Operator
    rotary_write: Operator
    skinny_linear: Operator
    skinny_swiglu: Operator
    swiglu: Operator
    packed_linear: Operator
    unpack: Operator
    round_rows: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    norm_round: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    swiglu_round: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    scaled_linear: Operator
    router_logits: Operator
    route_experts: Callable[..., Any]
    """Returns the choices that the three operators of experts take."""
    order_rows: Callable[..., Any]
    """Returns the same of rows that were routed elsewhere."""
    expert_swiglu: Operator
    expert_linear: Operator
    packed_expert_swiglu: Operator
    packed_expert_linear: Operator
    sum_experts: Operator
    adapted_linear: Operator
    short_conv: Operator
    causal_conv: Operator
    delta_rule: Operator
    state_space: Operator
    selective_scan: Operator
    begin_states: Operator
    end_states: Operator
    sample: Operator
    make_scratch: Callable[[int, int, int, int, torch.device], Any]
    """`(rows, heads, head_dim, max_tokens, device)`: what `paged_decode` writes its partial sums to."""
    make_routed: Callable[[int, int, int, torch.device], Any]
    """`(rows, experts, experts a row, device)`: what `route_experts` writes its choices to."""
    make_sample_scratch: Callable[[int, int, torch.device], Any]
    """`(rows, vocab, device)`: what `sample` writes what is left of a distribution to."""
    fresh_rows: Callable[..., Any] | None = None
    """Rows that `paged_decode` rotates and writes by itself, of the arguments of FreshRows in
    kernels/gpu/decode_rotary.py; None: `rotary_write` does it before.
    """
    invariant_linear: Operator | None = None
    """The product of the batch-invariant step (batch_invariant.py), whose other operators have one order of
    sums then, too; None: products are chosen by their rows.
    """


def triton_operators() -> Operators:
    """Return the Triton kernels. Raises TritonUnavailable."""
    try:
        # Imported here: installations for the CPU alone have no Triton, and do not need it.
        from kernels.gpu.adapted_linear import adapted_linear
        from kernels.gpu.causal_conv import causal_conv, short_conv
        from kernels.gpu.decode_rotary import FreshRows
        from kernels.gpu.decode_splits import make_scratch
        from kernels.gpu.delta_rule import delta_rule
        from kernels.gpu.expert_linear import expert_linear, expert_swiglu, sum_experts
        from kernels.gpu.norm_round import norm_round
        from kernels.gpu.packed_experts import packed_expert_linear, packed_expert_swiglu
        from kernels.gpu.packed_linear import packed_linear, unpack
        from kernels.gpu.paged_decode import paged_decode
        from kernels.gpu.paged_prefill import paged_prefill
        from kernels.gpu.rms_norm import add_rms_norm, rms_norm
        from kernels.gpu.rotary_write import rotary_write
        from kernels.gpu.round_rows import round_rows
        from kernels.gpu.route_experts import RoutedRows, order_rows, route_experts, router_logits
        from kernels.gpu.sample import make_scratch as make_sample_scratch
        from kernels.gpu.sample import sample
        from kernels.gpu.scaled_linear import scaled_linear
        from kernels.gpu.selective_scan import selective_scan
        from kernels.gpu.skinny_linear import skinny_linear, skinny_swiglu
        from kernels.gpu.state_pages import begin_states, end_states
        from kernels.gpu.state_space import state_space
        from kernels.gpu.sum_parts import sum_parts, sum_parts_rms_norm
        from kernels.gpu.swiglu import swiglu
        from kernels.gpu.swiglu_round import swiglu_round
    except ImportError as error:
        raise TritonUnavailable(f"no Triton kernels here: {error}") from error
    return Operators(
        paged_decode=paged_decode,
        paged_prefill=paged_prefill,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        sum_parts=sum_parts,
        sum_parts_rms_norm=sum_parts_rms_norm,
        rotary_write=rotary_write,
        skinny_linear=skinny_linear,
        skinny_swiglu=skinny_swiglu,
        swiglu=swiglu,
        packed_linear=packed_linear,
        unpack=unpack,
        round_rows=round_rows,
        norm_round=norm_round,
        swiglu_round=swiglu_round,
        scaled_linear=scaled_linear,
        router_logits=router_logits,
        route_experts=route_experts,
        order_rows=order_rows,
        expert_swiglu=expert_swiglu,
        expert_linear=expert_linear,
        packed_expert_swiglu=packed_expert_swiglu,
        packed_expert_linear=packed_expert_linear,
        sum_experts=sum_experts,
        adapted_linear=adapted_linear,
        short_conv=short_conv,
        causal_conv=causal_conv,
        delta_rule=delta_rule,
        state_space=state_space,
        selective_scan=selective_scan,
        begin_states=begin_states,
        end_states=end_states,
        sample=sample,
        make_scratch=make_scratch,
        make_routed=RoutedRows.make,
        make_sample_scratch=make_sample_scratch,
        fresh_rows=FreshRows,
    )
