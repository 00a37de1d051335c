"""Norms over all heads of queries and of keys together (OLMo), where the heads are dealt to parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.backends.triton.layer_halves import LayerHalves
from diptych.engine.backends.triton.parts_activations import PartsActivations
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.parts import Part, parts_of_rank, repeats_keys
from kernels.rms_norm import rms_norm


class PartsWidthNorm:
    """Norm of each part's queries and keys by the mean square of those of all parts."""

    def __init__(
        self,
        shape: ModelShape,
        parts: Sequence[Part],
        halves: Sequence[LayerHalves],
        communicator: Communicator,
    ) -> None:
        self._halves, self._communicator, self._eps = halves, communicator, shape.rms_eps
        self._widths = [count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads)]
        numbers = parts_of_rank(len(parts), communicator.rank, communicator.ranks)
        # Keys that several parts have count once.
        counted = [float(not repeats_keys(parts, number)) for number in numbers]
        self._counted = torch.tensor(counted, device=halves[0].weights.device)

    def normalise(self, index: int, buffers: PartsActivations) -> None:
        """Normalise queries and keys in the parts' `qkv`, of layer `index`. Raises GroupBroken."""
        columns = [
            half.queries_and_keys(one.qkv) for half, one in zip(self._halves, buffers.own, strict=True)
        ]
        squares = [torch.stack([numbers.float().square().sum(1) for numbers in pair]) for pair in columns]
        own_P2T = torch.stack(squares)
        own_P2T[:, 1] *= self._counted[:, None]
        total_2T, *others = self._communicator.all_gather(own_P2T).flatten(0, 1)
        for of_part in others:
            total_2T = total_2T + of_part
        means = [(total / width)[:, None] for total, width in zip(total_2T, self._widths, strict=True)]
        for half, pair in zip(self._halves, columns, strict=True):
            layer = half.weights.layers[index]
            for numbers, norm, mean in zip(pair, (layer.q_norm, layer.k_norm), means, strict=True):
                assert norm is not None
                numbers.copy_(rms_norm(numbers, norm, self._eps, mean))
