"""The step in torch: the decoder over a batch of sequences in paged blocks. The meaning, and the slow
path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import AbortWords, SequenceStep
from engine.decoder import Decoder
from engine.shape import ModelShape
from engine.weights import Weights
from kernels.paged_attention import paged_attention, write_kv


@dataclass(frozen=True)
class _Row:
    """One sequence's tokens `begin .. end` of the step's flat list, and where its blocks are."""

    index: int
    begin: int
    end: int
    start: int
    blocks: torch.Tensor
    table: torch.Tensor


class TorchBackend:
    """Executes steps with the torch meaning of every operator."""

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        self._decoder = Decoder(shape, weights)
        self._shape = shape

    def set_threads(self, threads: int) -> None:
        """Use `threads` cores in this process' torch calls from the calling thread."""
        torch.set_num_threads(threads)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`; rows of aborted sequences are NaN."""
        rows, tokens, positions, last = _flatten(sequences)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            mixed = torch.zeros_like(q)
            window = self._shape.window(layer)
            for row in rows:
                if abort is not None and abort.is_aborted(row.index):
                    continue
                span = slice(row.begin, row.end)
                write_kv(row.blocks, layer, row.table, row.start, k[span], v[span])
                mixed[span] = paged_attention(q[span], row.blocks, layer, row.table, row.start, window)
            return mixed

        def wanted() -> bool:
            return abort is None or not abort.all_aborted()

        with torch.inference_mode():
            logits = self._decoder.forward(tokens, positions, last, attend, wanted)
            if logits is None:
                return torch.full((len(last), self._shape.vocab_size), torch.nan)
            if abort is not None:
                with_logits = [i for i, step in enumerate(sequences) if step.wants_logits]
                logits[[abort.is_aborted(i) for i in with_logits]] = torch.nan
            return logits


def _flatten(
    sequences: Sequence[SequenceStep],
) -> tuple[list[_Row], torch.Tensor, torch.Tensor, torch.Tensor]:
    rows: list[_Row] = []
    tokens: list[int] = []
    positions: list[torch.Tensor] = []
    last: list[int] = []
    for index, step in enumerate(sequences):
        begin, count = len(tokens), len(step.token_ids)
        tokens.extend(step.token_ids)
        positions.append(torch.arange(step.start, step.start + count))
        table = torch.tensor(list(step.block_table), dtype=torch.int64)
        rows.append(_Row(index, begin, begin + count, step.start, step.memory.data, table))
        if step.wants_logits:
            last.append(begin + count - 1)
    return rows, torch.tensor(tokens), torch.cat(positions), torch.tensor(last, dtype=torch.int64)
