"""The reference backend: the decoder in torch over a batch of sequences in paged blocks, slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.backends.torch.decoder import Decoder
from diptych.engine.backends.torch.row_groups import Chunk, Decodes, ScoreRule, group_rows
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Weights


class TorchBackend:
    """Executes steps with the torch meaning of every operator."""

    def __init__(self, shape: ModelShape, weights: Weights, kv_scales: torch.Tensor | None = None) -> None:
        """Prepare the decoder; with `kv_scales` (kernels/fp8_cache.py) keys and values are kept in FP8."""
        self._scales = kv_scales
        self._decoder = Decoder(shape, weights)
        self._shape = shape
        self._rules = [
            ScoreRule(shape.window(index), shape.score_scale, shape.score_cap, layer.sinks)
            for index, layer in enumerate(weights.layers)
        ]

    def set_threads(self, threads: int) -> None:
        """Use `threads` cores in this process' torch calls from the calling thread."""
        torch.set_num_threads(threads)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`; rows of aborted sequences are NaN."""
        with torch.inference_mode():
            tokens, positions, last = _flatten(sequences)
            groups: list[Chunk | Decodes] = group_rows(sequences)

            def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                if (latent := self._shape.latent) is not None:
                    mixed = q.new_zeros(*q.shape[:-1], latent.rank)
                    for group in groups:
                        group.attend_latents(layer, self._shape.score_scale, q, k, mixed)
                    return mixed
                mixed = torch.zeros_like(q)
                for group in groups:
                    group.attend(layer, self._rules[layer], q, k, v, mixed, self._scales)
                return mixed

            def wanted() -> bool:
                if abort is None:
                    return True
                if abort.all_aborted():
                    return False
                if abort.words.any():
                    groups[:] = group_rows(sequences, abort)
                return True

            logits = self._decoder.forward(tokens, positions, last, attend, wanted)
            if logits is None:
                return torch.full((len(last), self._shape.vocab_size), torch.nan)
            if abort is not None:
                owners = [i for i, step in enumerate(sequences) for _ in range(step.logit_rows)]
                logits[[abort.is_aborted(i) for i in owners]] = torch.nan
            return logits


def _flatten(sequences: Sequence[SequenceStep]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and positions of all sequences in a row, and the indices of the tokens after which logits are
    wanted.
    """
    tokens: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    for step in sequences:
        tokens.extend(step.token_ids)
        positions.extend(range(step.start, step.start + len(step.token_ids)))
        last.extend(range(len(tokens) - step.logit_rows, len(tokens)))
    return torch.tensor(tokens), torch.tensor(positions), torch.tensor(last, dtype=torch.int64)
