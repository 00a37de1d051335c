"""Groups of a step's rows for attention: each chunk by itself, decode rows of one memory together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diptych.engine.batch import AbortWords, SequenceStep, visible_ends, window_cuts
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import LatentShape, ModelShape
from kernels.kv_blocks import write_kv_rows
from kernels.latent_attention import latent_attention, latent_decode, write_latents
from kernels.paged_attention import paged_attention, write_kv
from kernels.paged_decode import paged_decode


@dataclass(frozen=True)
class ScoreRule:
    """Rule of one layer for making weights of the products of queries and keys."""

    window: int | None
    scale: float
    cap: float | None
    sinks: torch.Tensor | None

    def changes(self) -> dict[str, Any]:
        """Return the arguments of the attention kernels beside the window."""
        return {"scale": self.scale, "cap": self.cap, "sinks": self.sinks}


@dataclass(frozen=True)
class Chunk:
    """Several tokens of one sequence: rows `span` of the step's flat list."""

    span: slice
    start: int
    blocks: torch.Tensor
    table: torch.Tensor
    ends: torch.Tensor | None = None
    """First position that each token does not see; None: the one after its own."""
    tree: torch.Tensor | None = None
    """Bool `[tokens, tokens]` of a tree: which tokens each one sees. None: it is a chain."""

    def attend(
        self,
        layer: int,
        rule: ScoreRule,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:
        """Store this chunk's keys and values, and write its attention into its rows of `out`.

        `scales` are those of a cache in FP8 (kernels/fp8_cache.py).
        """
        write_kv(self.blocks, layer, self.table, self.start, k[self.span], v[self.span], scales)
        out[self.span] = paged_attention(
            q[self.span],
            self.blocks,
            layer,
            self.table,
            self.start,
            rule.window,
            scales,
            ends=self.ends,
            tree=self.tree,
            **rule.changes(),
        )

    def attend_latents(
        self, layer: int, scale: float, query: torch.Tensor, latents: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Store this chunk's latents, and write its attention over latents into its rows of `out`."""
        at = torch.arange(self.start, self.start + self.span.stop - self.span.start, device=query.device)
        size = self.blocks.shape[-1] // latents.shape[-1]
        write_latents(self.blocks, layer, self.table[at // size], at % size, latents[self.span])
        out[self.span] = latent_attention(
            query[self.span], self.blocks, layer, self.table, self.start, rank=out.shape[-1], scale=scale
        )


@dataclass(frozen=True)
class Decodes:
    """Decode rows of several sequences of one memory: `rows` of the step's flat list."""

    rows: torch.Tensor
    blocks: torch.Tensor
    tables: torch.Tensor
    """`[rows, n]`, short tables padded with their own first block."""
    lengths: torch.Tensor
    ids: torch.Tensor
    lanes: torch.Tensor

    def attend(
        self,
        layer: int,
        rule: ScoreRule,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:
        """Store the rows' keys and values, and write their attention into `out`; `scales` as for a chunk."""
        write_kv_rows(self.blocks, layer, self.ids, self.lanes, k[self.rows], v[self.rows], scales)
        out[self.rows] = paged_decode(
            q[self.rows], self.blocks, layer, self.tables, self.lengths, rule.window, scales, **rule.changes()
        )

    def attend_latents(
        self, layer: int, scale: float, query: torch.Tensor, latents: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Store the rows' latents, and write their attention over latents into `out`."""
        write_latents(self.blocks, layer, self.ids, self.lanes, latents[self.rows])
        out[self.rows] = latent_decode(
            query[self.rows], self.blocks, layer, self.tables, self.lengths, rank=out.shape[-1], scale=scale
        )


def group_tables(
    sequences: Sequence[SequenceStep], abort: AbortWords | None = None
) -> list[list[Chunk | Decodes]]:
    """Return the groups of a step for each table of its layers (`KVLayout.windows`), the full one first."""
    return [group_rows(steps, abort) for steps in (sequences, *window_cuts(sequences))]


@dataclass(frozen=True)
class GroupAttention:
    """Attention of a model's layers: what of a decoder's `Attend` does not depend on the step."""

    rules: Sequence[ScoreRule]
    """Rule of each layer."""
    latent: LatentShape | None = None
    scales: torch.Tensor | None = None
    """Scales of a cache in FP8."""

    def attend(
        self,
        groups: Sequence[Chunk | Decodes],
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slot: int | None = None,
    ) -> torch.Tensor:
        """Store keys and values `[T, K, D]` of the step's `groups` and return what `q [T, N, D]` mixes of all
        that is stored, zeros for rows of no group. Over latents, queries and latents take all three places.
        `slot` is the layer's place in a block, by default its number.
        """
        slot = layer if slot is None else slot
        if self.latent is not None:
            mixed = q.new_zeros(*q.shape[:-1], self.latent.rank)
            for group in groups:
                group.attend_latents(slot, self.rules[layer].scale, q, k, mixed)
            return mixed
        mixed = torch.zeros_like(q)
        scales = None if self.scales is None else self.scales[layer - slot :]  # so that its own are at `slot`
        for group in groups:
            group.attend(slot, self.rules[layer], q, k, v, mixed, scales)
        return mixed


def attention_of(
    shape: ModelShape, sinks: Sequence[torch.Tensor | None], scales: torch.Tensor | None = None
) -> GroupAttention:
    """Return the attention of a model of `shape`, whose layers have these sinks (`ScoreRule.sinks`)."""
    rules = [
        ScoreRule(shape.window(index), shape.score_scale, shape.score_cap, of_layer)
        for index, of_layer in enumerate(sinks)
    ]
    return GroupAttention(rules, shape.latent, scales)


def group_rows(sequences: Sequence[SequenceStep], abort: AbortWords | None = None) -> list[Chunk | Decodes]:
    """Return the groups of a step, without the sequences that were aborted.

    Decode rows share a group if their memory is one and their lengths lie within a factor of two: every row
    is padded to the longest of its group.
    """
    groups: list[Chunk | Decodes] = []
    decodes: dict[tuple[int, int], list[tuple[int, SequenceStep]]] = {}
    begin = 0
    for index, step in enumerate(sequences):
        end = begin + len(step.token_ids)
        if abort is None or not abort.is_aborted(index):
            if end - begin > 1:
                table = torch.tensor(_used(step), dtype=torch.int64, device=step.memory.data.device)
                ends = visible_ends(step)
                seen = None if ends is None else torch.from_numpy(ends).to(table.device)
                span = slice(begin, end)
                groups.append(Chunk(span, step.start, step.memory.data, table, seen, _tree(step)))
            else:
                key = (id(step.memory), len(_used(step)).bit_length())
                decodes.setdefault(key, []).append((begin, step))
        begin = end
    groups.extend(_decodes(rows) for rows in decodes.values())
    return groups


def _tree(step: SequenceStep) -> torch.Tensor | None:
    """Return which tokens of a tree each one sees: its ancestors and itself."""
    if step.parents is None:
        return None
    seen = torch.eye(len(step.parents), dtype=torch.bool)
    for place, parent in enumerate(step.parents):
        if parent >= 0:
            seen[place] |= seen[parent]
    return seen.to(step.memory.data.device)


def _used(step: SequenceStep) -> list[int]:
    return list(step.block_table[: step.memory.layout.blocks_for(step.start + len(step.token_ids))])


def _decodes(rows: list[tuple[int, SequenceStep]]) -> Decodes:
    memory: KVMemory = rows[0][1].memory
    tables = [_used(step) for _, step in rows]
    longest = max(map(len, tables))
    block_size = memory.layout.block_size

    def numbers(values: Any) -> torch.Tensor:
        return torch.tensor(values, device=memory.data.device)

    return Decodes(
        rows=numbers([row for row, _ in rows]),
        blocks=memory.data,
        tables=numbers([table + table[:1] * (longest - len(table)) for table in tables]),
        lengths=numbers([step.start + 1 for _, step in rows]),
        ids=numbers([table[-1] for table in tables]),
        lanes=numbers([step.start % block_size for _, step in rows]),
    )
