"""The sum of what all parts of a model add to the residual, over the ranks that computed them.

The bits do not depend on the number of ranks: every rank gathers all parts and adds them in their order, in
float32 (kernels/sum_parts.py).
"""

from __future__ import annotations

import torch

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.parts_activations import PartsActivations
from diptych.engine.backends.triton.rounded_inputs import Matrix, Norms, Rows, rounds
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.communicator import Communicator


class PartsSum:
    """Norms of the residual of a model, to which the ranks of a group add what their parts give."""

    def __init__(self, shape: ModelShape, operators: Operators, communicator: Communicator) -> None:
        self._norms, self._operators = Norms(shape, operators), operators
        self._eps, self._is_scaled = shape.rms_eps, shape.residual_scale != 1.0
        self._communicator = communicator

    def first(self, norm: torch.Tensor | None, before: Matrix, buffers: PartsActivations) -> Rows:
        """See `Norms.first`."""
        return self._norms.first(norm, before, buffers)

    def add(
        self,
        own_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
        before: Matrix,
        buffers: PartsActivations,
    ) -> Rows:
        """Add the sum of all ranks' outputs to the residual, and return what the next half reads, as
        `Norms.add` does. Raises GroupBroken.
        """
        every = self._communicator.all_gather(buffers.outputs).flatten(0, 1)
        rounded = rounds(before, self._operators, len(buffers.residual))
        plain = own_norm is None and not self._is_scaled and not rounded
        if plain and next_norm is not None:
            return self._operators.sum_parts_rms_norm(
                every, buffers.residual, next_norm, self._eps, out=buffers.normed
            )
        self._operators.sum_parts(every, out=buffers.added)
        return self._norms.add(own_norm, next_norm, before, buffers)
