"""The layers of one rank of a group as kernels; the meaning is backends/torch/parts_decoder.py.

Each part of the rank is a narrower model, whose halves of layers are those of a whole one (layer_halves.py).
What the parts add to the residual is gathered from all ranks and added in the order of the parts. Every
product has the shape of a part, at every degree. So the same parts give the same bits on one rank and on
many, if the ranks have cards of one kind.

With a part a rank, a layer has the launches of a whole model's: the sum takes the place of the norm that adds
to the residual.

Numbers of layers are those of the rank's stage, except for the stop word. Where exchanges are queued on the
device, ranks launch layers without waiting for one another: the word names a layer then that none of them has
come to (stop_word.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from diptych.engine.backends.triton.activations import RotaryTables
from diptych.engine.backends.triton.adapters import PlacedAdapters
from diptych.engine.backends.triton.launch_throttle import layers_ahead
from diptych.engine.backends.triton.layer_halves import LayerHalves
from diptych.engine.backends.triton.layers import always, query_growth
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_step import PackedStep
from diptych.engine.backends.triton.packed_weights import PackedLayer, PackedWeights
from diptych.engine.backends.triton.parts_activations import PartsActivations
from diptych.engine.backends.triton.parts_adapters import PartsAdapters
from diptych.engine.backends.triton.parts_ends import PartsEnds
from diptych.engine.backends.triton.parts_experts import PartsExperts
from diptych.engine.backends.triton.parts_sum import PartsSum
from diptych.engine.backends.triton.parts_width_norm import PartsWidthNorm
from diptych.engine.backends.triton.rounded_inputs import Matrix, Rows
from diptych.engine.batch import add_rows_after
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.kv_shares import KVShare
from diptych.engine.parallel.parts import Part, parts_of_rank
from diptych.engine.parallel.pipeline import Links, send
from diptych.engine.parallel.stage_images import cut_rows
from diptych.engine.parallel.stages import Stage
from diptych.engine.parallel.stop_word import StopWord, first_common_layer


class PartsLayers:
    """Forward pass of the parts of one rank; every rank calls it with the same step."""

    adapters: PlacedAdapters | None = None
    """Adapters that rows may have; None: none may (`allow_adapters`)."""

    def __init__(
        self,
        shape: ModelShape,
        parts: Sequence[Part],
        weights: Sequence[PackedWeights],
        operators: Operators,
        links: Links,
        stage: Stage,
        stop_word: StopWord,
        *,
        kv_scales: torch.Tensor | None = None,
        held: KVShare | None = None,
    ) -> None:
        """Take all parts of the model, and the weights that this rank's have in the layers of `stage`.

        `kv_scales`, float32 `[layers, 2, kv_heads]` of the whole model, say that the KV cache is in FP8.
        Memories hold whole blocks, or the share `held` of each.
        """
        self.shape, self.operators, self.leads = stage.shape_of(shape), operators, links.leads
        self._links, self._stage, self._stop_word = links, stage, stop_word
        self.paced = links.on_device and not links.is_alone
        ranks = links.ranks
        own = [parts[number] for number in parts_of_rank(len(parts), ranks.rank, ranks.ranks)]
        self._halves = [
            LayerHalves(part.shape_of(self.shape), packed, operators, _scales_of(part, kv_scales, stage))
            for part, packed in zip(own, weights, strict=True)
        ]
        self.weights = weights[0]
        """Weights of the first part: norms are the same in all."""
        self._shares = [_share_in(part, stage, held) for part in own]
        self._ends = PartsEnds(self.shape, parts, self._halves, links, stage)
        self._sum = PartsSum(self.shape, operators, ranks)
        self._width_norm = PartsWidthNorm(self.shape, parts, self._halves, ranks)
        self._experts = None
        """Experts to which rows are sent; None: each part adds its own experts' outputs."""
        if own[0].sends_rows:
            self._experts = PartsExperts(self.shape, parts, self._halves, operators, ranks)
        self.rotary = RotaryTables(self.shape, self.weights.device)

    @property
    def read_bytes(self) -> int:
        """Bytes of this rank's weights that a step reads: all but the embedding."""
        return sum(half.weights.read_bytes for half in self._halves)

    @property
    def expert_bytes(self) -> int:
        """Bytes of `read_bytes` that belong to experts among which rows choose."""
        return sum(half.weights.expert_bytes for half in self._halves)

    def allow_adapters(self, slots: int, max_rank: int) -> None:
        """See `ForwardPass.allow_adapters`: each part gets its share of them."""
        self.adapters = PartsAdapters([half.allow_adapters(slots, max_rank) for half in self._halves])

    def twin(self) -> PartsLayers:
        """Raise RuntimeError: the other ranks have no second set."""
        raise RuntimeError("the parts of a group are computed once")

    def buffers(self, tokens: int) -> PartsActivations:
        """Allocate buffers for up to `tokens` tokens."""
        shapes = [half.shape for half in self._halves]
        weights = self.weights
        return PartsActivations.make(
            shapes, tokens, weights.dtype, weights.device, self.operators.make_routed
        )

    def agree(self, tokens: torch.Tensor) -> None:
        """Make `tokens [T]` those of the stage's first rank: in the group's first stage, rank 0's."""
        if self._links.ranks.ranks > 1 and self._stage.is_first:
            tokens.copy_(self._links.ranks.all_gather(tokens)[0])

    def hidden(
        self,
        step: PackedStep,
        buffers: PartsActivations,
        scratch: Any,
        wanted: Callable[[], bool] = always,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Return the last layer's output of the stage, `[T, hidden]`, normalised in the last stage.

        Args:
            wanted: asked before every layer on the rank that leads, which then stops all by the stop word.
                None is returned where the layers of any stage are not all computed.
            given: rows of images and their places, of which the stage takes its columns.

        Raises GroupBroken.
        """
        given = cut_rows(given, self._stage, self.shape.hidden_size)
        growth = query_growth(self.shape, step.positions, self.weights.dtype)
        steps = [_narrowed(step, share) for share in self._shares]
        self._ends.enter(step.tokens, buffers, given)
        ahead = layers_ahead(self.weights.device, step.num_tokens) if self.paced else 0
        if self.paced and ahead is not None and not self._stage.is_first and not step.recorded:
            _wait_for_rows(self.weights.device)
        self.rotary.gather(step.positions, buffers.angles)
        layers = self.weights.layers
        x = self._sum.first(layers[0].input_norm, self._alone(layers[0].qkv, step), buffers)
        following = [(one.input_norm, self._alone(one.qkv, step)) for one in layers[1:]]
        last = self.weights.final_norm if self._stage.is_last else None
        for index, (layer, next_half) in enumerate(zip(layers, [*following, (last, None)], strict=True)):
            if not self._goes_on(index, wanted, ahead):
                break
            self._attention(index, x, steps, buffers, scratch, growth)
            x = self._feed_forward(index, layer, next_half, step, buffers, given)
        if self._links.after is not None:
            send(self._links.after, buffers.residual)  # even if the step has ended: the next stage waits
        if self._stop_word.stops(self._stage.of_layers - 1):
            return None
        assert isinstance(x, torch.Tensor)  # no product's alone
        return x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits `[rows, vocab]` of rows of `hidden` on the process that leads; elsewhere `out`, or
        no rows. Raises GroupBroken.
        """
        logits = self._ends.logits(hidden)
        if logits is None:
            return hidden.new_empty((0, self.shape.vocab_size), dtype=torch.float32) if out is None else out
        return logits if out is None else out.copy_(logits)

    def _goes_on(self, index: int, wanted: Callable[[], bool], ahead: int | None) -> bool:
        """Return whether layer `index` is computed, the same on all ranks of the stage.

        `ahead` is the number of layers that a rank may have launched beyond those that all have exchanged;
        None: there is no bound, and the step is computed to its end.
        """
        layer = self._stage.layers.start + index
        if not wanted() and ahead is not None:
            self._stop_word.stop_before(first_common_layer(layer, ahead))
        return not self._stop_word.stops(layer)

    def _attention(
        self,
        index: int,
        x: Rows,
        steps: Sequence[PackedStep],
        buffers: PartsActivations,
        scratch: Any,
        growth: torch.Tensor | None,
    ) -> None:
        """Compute the first half of a layer of `x [T, hidden]` for each part, into `buffers.outputs`."""
        every = list(zip(self._halves, steps, buffers.own, strict=True))
        for half, step, own in every:
            half.project(index, x, step, own)
        if self.shape.qk_norm == "width":
            self._width_norm.normalise(index, buffers)
        for half, step, own in every:
            half.attend(index, step, own, scratch, growth)

    def _feed_forward(
        self,
        index: int,
        layer: PackedLayer,
        next_half: tuple[torch.Tensor | None, Matrix],
        step: PackedStep,
        buffers: PartsActivations,
        given: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Rows:
        """Add attention, in `buffers.outputs`, and the second half of a layer to the residual, and rows of
        images behind it, of `given`.

        Returns what the next layer reads, by its norm and its first matrix.
        """
        if self._experts is not None and layer.experts is not None:
            self._experts.add(index, layer, buffers, recorded=step.recorded)
            add_rows_after(buffers.residual, given, index)
            return self._sum.first(*next_half, buffers)
        gate_up = self._alone(layer.gate_up, step)
        x = self._sum.add(layer.attention_out_norm, layer.post_norm, gate_up, buffers)
        for half, own in zip(self._halves, buffers.own, strict=True):
            half.feed_forward(index, x, step, own)
        add_rows_after(buffers.residual, given, index)  # before the sum, which norms all of it
        return self._sum.add(layer.feed_forward_out_norm, *next_half, buffers)

    def _alone(self, matrix: Matrix, step: PackedStep) -> Matrix:
        """Return the first part's matrix if nothing else reads the same rows: no other part of this rank, and
        no adapter, which multiplies what is not rounded.
        """
        return matrix if len(self._halves) == 1 and step.adapters is None else None


def _wait_for_rows(device: torch.device) -> None:
    """Wait until the rows of the stage before are here.

    It has launched its last layer by then, so that all ranks of this stage find the same stop word.
    """
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()


def _share_in(part: Part, stage: Stage, held: KVShare | None) -> KVShare:
    """Return the layers of `stage` and the KV heads of `part` in blocks that hold the share `held`."""
    layer, head = (0, 0) if held is None else (held.layers.start, held.heads.start)
    return KVShare(
        range(stage.layers.start - layer, stage.layers.stop - layer),
        range(part.kv_heads.start - head, part.kv_heads.stop - head),
    )


def _narrowed(step: PackedStep, share: KVShare) -> PackedStep:
    """Return a step that reads and writes this share of its blocks."""
    tables = tuple(
        replace(
            table,
            groups=tuple(replace(group, blocks=share.of(group.blocks)) for group in table.groups),
            seeing=tuple(replace(rows, blocks=share.of(rows.blocks)) for rows in table.seeing),
        )
        for table in step.tables
    )
    return replace(step, tables=tables)


def _scales_of(part: Part, scales: torch.Tensor | None, stage: Stage) -> torch.Tensor | None:
    if scales is None:
        return None
    layers, heads = stage.layers, part.kv_heads
    return scales[layers.start : layers.stop, :, heads.start : heads.stop].contiguous()
