"""Feed-forwards of experts as kernels; the meaning is backends/torch/experts.py.

Six launches: the router's product, the choice, the order of rows by expert, gates and ups with their
activation, downs, and the sum; a shared expert's products come before the sum. Their grids depend on sizes
alone, so that a captured step serves every choice.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.engine.backends.triton.activations import Activations, ExpertBuffers
from diptych.engine.backends.triton.linear import Products
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_weights import PackedExperts
from diptych.engine.models.shape import ModelShape


class ExpertLayers:
    """The second half of layers with experts."""

    def __init__(self, shape: ModelShape, products: Products, operators: Operators) -> None:
        self._products, self._operators = products, operators
        experts = shape.experts
        self._choice: dict[str, Any] = {}
        self._held = None if experts is None else experts.held
        if experts is not None:
            self._choice = {
                "count": experts.experts_per_token,
                "routing": experts.routing,
                "normalise": experts.normalise,
                "scale": experts.scale,
                "groups": experts.groups,
                "groups_per_token": experts.groups_per_token,
                "group_score": experts.group_score,
            }

    def forward(self, layer: PackedExperts, x: torch.Tensor, buffers: Activations) -> None:
        """Compute the experts of `x [T, hidden]`, into `buffers.added`."""
        own = buffers.experts
        assert own is not None
        routed = self.route(layer, x, own.routed)
        self.multiply(layer, x, routed, own)
        self.add(layer, x, own.parts, self._here(routed), buffers)

    def route(self, layer: PackedExperts, x: torch.Tensor, room: Any) -> Any:
        """Choose the experts of `x [T, hidden]`, in `room` (`Operators.make_routed`) for as many rows."""
        return self._operators.route_experts(
            x, layer.router, layer.router_bias, layer.correction_bias, out=room, **self._choice
        )

    def multiply(
        self,
        layer: PackedExperts,
        x: torch.Tensor,
        routed: Any,
        room: ExpertBuffers,
        out: torch.Tensor | None = None,
    ) -> None:
        """Compute the outputs of the experts that are here for `x [T, hidden]`, into `out`, or `room.parts`,
        `[T * K, hidden]` in the order of pairs; those of other experts stay as they are.
        """
        routed = self._here(routed)
        layer.gate_up.gated(self._operators, x, routed, out=room.inner, **self._products.activation)
        layer.down.multiply(self._operators, room.inner, routed, out=room.parts if out is None else out)

    def add(
        self,
        layer: PackedExperts,
        x: torch.Tensor,
        parts: torch.Tensor,
        routed: Any,
        buffers: Activations,
    ) -> None:
        """Add the outputs `parts [T * K, hidden]` of each row of `x`, and the shared expert's, into
        `buffers.added`.
        """
        operators, own = self._operators, buffers.experts
        assert own is not None
        shared = switch = None
        if layer.shared_gate_up is not None and layer.shared_down is not None:
            room = buffers.feed_forward(layer.shared_down.inputs)
            shared = self._products.feed_forward(
                x, layer.shared_gate_up, layer.shared_down, room, out=buffers.added
            )
            if layer.shared_router is not None:
                switch = operators.router_logits(x, layer.shared_router, out=own.switch)
        operators.sum_experts(parts, routed, shared, switch, out=buffers.added)

    def _here(self, routed: Any) -> Any:
        """Return choices for the experts that are here alone."""
        return routed if self._held is None else routed.among(self._held)
