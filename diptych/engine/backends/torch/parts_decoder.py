"""The decoder of one rank: each of its parts is a narrower decoder, and the ranks add their outputs.

Names carry shapes as in decoder.py, and P is the number of all parts. Every product has the shape of a part,
at every degree, and what the parts give is added in their order, in float32. So the same parts give the same
bits on one rank and on many.

All ranks of a stage have all hidden rows before attention, whose heads are dealt. Before experts, too, unless
rows are sent to them: then a rank goes on after attention with its share of the rows alone (expert_rows.py),
until all gather them again.

A rank of a pipeline has the layers of its stage. Numbers of layers are the stage's here, except for `wanted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from diptych.engine.backends.torch.adapters import StepAdapters
from diptych.engine.backends.torch.decoder import Angles, Attend, Decoder, Projected
from diptych.engine.backends.torch.expert_rows import ExpertRows
from diptych.engine.backends.torch.fused_layer import FusedLayer
from diptych.engine.backends.torch.part_sums import PartSums
from diptych.engine.batch import add_rows_after, put_rows
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.parts import Part, experts_of_ranks, parts_of_rank, repeats_keys
from diptych.engine.parallel.pipeline import Links, receive, receive_with, send, send_with
from diptych.engine.parallel.stages import Stage
from diptych.engine.parallel.vocab_shares import VocabShares
from diptych.engine.weights import Weights


@dataclass(frozen=True)
class PartsStep:
    """A step as a rank computes it."""

    tokens: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    """Rows of the step after which logits are wanted."""
    attends: Sequence[Attend]
    """Attention of each own part."""
    changes: Sequence[StepAdapters | None]
    """Shares of the step's adapters that the own parts have."""
    given: tuple[torch.Tensor, torch.Tensor] | None = None
    """Rows of images, as `rows_of_stage` returns them."""
    taps: Sequence[int] | None = None
    """Layers of the model whose features are wanted, and hidden rows with them; see `Decoder.forward`."""


@dataclass
class PartsOutput:
    """Results of a step on rank 0."""

    logits: torch.Tensor
    """Float32 `[len(last), vocab]`."""
    hidden: torch.Tensor | None = None
    """The rows `[len(last), H]` behind the final norm, where they are wanted."""
    features: torch.Tensor | None = None
    """`[T, taps * H]`, the residual stream before each tapped layer."""


class PartsDecoder:
    """Token ids in, logits of chosen tokens out on rank 0; every rank calls it with the same step."""

    def __init__(
        self, shape: ModelShape, parts: Sequence[Part], weights: Sequence[Weights], links: Links, stage: Stage
    ) -> None:
        """Take all parts of the model, and the weights that this rank's have in the layers of `stage`."""
        self._shape, self._stage = stage.shape_of(shape), stage
        self._links, self._communicator = links, links.ranks
        numbers = parts_of_rank(len(parts), self._communicator.rank, self._communicator.ranks)
        self.own = [parts[number] for number in numbers]
        self.decoders = [
            Decoder(part.shape_of(self._shape), own) for part, own in zip(self.own, weights, strict=True)
        ]
        self._embed = [own.embed for own in weights]
        self._device = weights[0].embed.device
        self._vocab = VocabShares(parts, self._communicator, self._device)
        self._sums = PartSums(self._communicator, len(parts))
        self._experts = self._expert_rows(parts) if self.own[0].sends_rows else {}
        self._own_keys = torch.tensor(
            [not repeats_keys(parts, number) for number in numbers], device=self._device
        )

    def forward(
        self, step: PartsStep, wanted: Callable[[int], bool], finished: Callable[[], bool]
    ) -> PartsOutput | None:
        """Return logits of the rows `step.last` of the step, and what else it wants; None on other ranks.

        Args:
            wanted: asked before every layer of the stage, by its number in the model; it answers all ranks of
                the stage alike.
            finished: asked after them whether all layers of the model are computed; it answers all ranks
                alike. None is returned where they are not.
        """
        lead, first = self.decoders[0], self._stage.layers.start  # norms are the same in all
        angles, growth = lead.angles(step.positions), lead.growth(step.positions)
        x_TH, features = self._entering(step)
        for index in range(len(lead.layers)):
            if not wanted(first + index):
                break
            if step.taps is not None and first + index in step.taps:
                features[first + index] = x_TH
            x_TH = self._layer(index, x_TH, angles, growth, step.attends, step.changes)
            add_rows_after(x_TH, step.given, index)
        if self._links.after is not None:
            # Even if the step has ended: the next stage waits for it.
            kept = {tap: features.get(tap, x_TH) for tap in _taps_before(step, self._stage.layers.stop)}
            send_with(self._links.after, x_TH, kept)
        if not finished():
            return None
        return self._at_home(step, self._ended(step, x_TH, features))

    def _layer(
        self,
        index: int,
        x_TH: torch.Tensor,
        angles: Angles,
        growth: torch.Tensor | None,
        attends: Sequence[Attend],
        changes: Sequence[StepAdapters | None],
    ) -> torch.Tensor:
        lead = self.decoders[0]
        layer = lead.layers[index]
        normed = lead.norm(x_TH, layer.input_norm, layer.input_norm_bias)
        if self._shape.qk_norm == "width" and self._shape.latent is None:
            outputs = self._attention_normed_together(index, normed, angles, growth, attends, changes)
        else:
            outputs = (
                decoder.attention(index, decoder.layers[index], normed, angles, growth, attend, change)
                for decoder, attend, change in zip(self.decoders, attends, changes, strict=True)
            )
        if (experts := self._experts.get(index)) is not None:
            return self._through_experts(layer, experts, x_TH, normed, outputs)
        x_TH = x_TH + lead.added(self._sums.of_all_rows(outputs), layer.attention_out_norm)
        if not self._shape.parallel_residual:
            normed = lead.norm(x_TH, layer.post_norm, layer.post_norm_bias)
        fed = self._sums.of_all_rows(
            decoder.feed_forward(index, decoder.layers[index], normed, change)
            for decoder, change in zip(self.decoders, changes, strict=True)
        )
        return x_TH + lead.added(fed, layer.feed_forward_out_norm)

    def _through_experts(
        self,
        layer: FusedLayer,
        experts: ExpertRows,
        x_TH: torch.Tensor,
        normed: torch.Tensor,
        outputs: Iterable[torch.Tensor],
    ) -> torch.Tensor:
        """Return the residual stream behind a layer whose rows are sent to their experts.

        From the sum of attention on each rank goes on with its share of the rows.
        """
        lead, rank = self.decoders[0], self._communicator.rank
        shares = self._sums.shares(len(x_TH))
        mine = slice(shares.of_ranks[rank].start, shares.of_ranks[rank].stop)
        attended = self._sums.of_own_rows(outputs, shares)
        x_TH, normed = x_TH[mine] + lead.added(attended, layer.attention_out_norm), normed[mine]
        if not self._shape.parallel_residual:
            normed = lead.norm(x_TH, layer.post_norm, layer.post_norm_bias)
        fed = experts(normed, shares.own_parts(rank))
        x_TH = x_TH + lead.added(fed, layer.feed_forward_out_norm)
        return self._sums.gather_rows(x_TH, shares)

    def _expert_rows(self, parts: Sequence[Part]) -> dict[int, ExpertRows]:
        """Return the experts of each layer that has some, of all parts of the model."""
        spans = experts_of_ranks(parts, self._communicator.ranks)
        made = {}
        for index in range(len(self.decoders[0].layers)):
            own = [experts for one in self.decoders if (experts := one.experts_of(index)) is not None]
            if own:
                made[index] = ExpertRows(self._communicator, own, spans)
        return made

    def _attention_normed_together(
        self,
        index: int,
        normed: torch.Tensor,
        angles: Angles,
        growth: torch.Tensor | None,
        attends: Sequence[Attend],
        changes: Sequence[StepAdapters | None],
    ) -> Iterable[torch.Tensor]:
        """Yield each own part's attention where queries are normalised over all heads, and so are keys."""
        projected = [
            decoder.project(index, decoder.layers[index], normed, change)
            for decoder, change in zip(self.decoders, changes, strict=True)
        ]
        means = self._mean_squares(projected)
        own = zip(self.decoders, projected, attends, changes, strict=True)
        for decoder, each, attend, change in own:
            yield decoder.mix(index, decoder.layers[index], each, angles, growth, attend, change, means)

    def _mean_squares(self, projected: Sequence[Projected]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the means of the squares of all heads' queries and of all keys, float32 `[T, 1]` both.

        Keys that several parts have count once.
        """
        q = torch.stack([each[0].float().square().sum(dim=(1, 2)) for each in projected])
        k = torch.stack([each[1].float().square().sum(dim=(1, 2)) for each in projected])
        own_P2T = torch.stack([q, k * self._own_keys[:, None]], dim=1)
        every_P2T = self._communicator.all_gather(own_P2T).flatten(0, 1)
        total_2T = every_P2T[0]
        for of_part in every_P2T[1:]:
            total_2T = total_2T + of_part
        width = self._shape.head_dim
        means = (
            total_2T[0] / (self._shape.num_heads * width),
            total_2T[1] / (self._shape.num_kv_heads * width),
        )
        return means[0][:, None], means[1][:, None]

    def _entering(self, step: PartsStep) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return the hidden rows that enter the stage's first layer, and the features of layers before it."""
        if self._links.before is not None:
            width, dtype = self._shape.hidden_size, self.decoders[0].dtype
            like = torch.zeros((len(step.tokens), width), dtype=dtype, device=self._device)
            return receive_with(self._links.before, like, _taps_before(step, self._stage.layers.start))
        x_TH = self._embedded(step.tokens)
        put_rows(x_TH, step.given)
        return x_TH, {}

    def _ended(
        self, step: PartsStep, x_TH: torch.Tensor, features: dict[int, torch.Tensor]
    ) -> PartsOutput | None:
        """Return what the last stage makes of its last layer's output on its first rank."""
        if not self._stage.is_last:
            return None
        lead, layers = self.decoders[0], self._stage.of_layers
        normed = lead.norm(x_TH[step.last], lead.final_norm, lead.final_norm_bias)
        logits = self._all_logits(normed)
        if logits is None or step.taps is None:
            return None if logits is None else PartsOutput(logits)
        if layers in step.taps:
            features[layers] = lead.norm(x_TH, lead.final_norm, lead.final_norm_bias)
        tapped = torch.cat([features[tap] for tap in step.taps], dim=1) if step.taps else None
        return PartsOutput(logits, normed, tapped)

    def _at_home(self, step: PartsStep, output: PartsOutput | None) -> PartsOutput | None:
        """Return the last stage's output on rank 0."""
        if (home := self._links.home) is None:
            return output
        if output is not None:
            for numbers in (output.logits, output.hidden, output.features):
                if numbers is not None:
                    send(home, numbers)
            return None
        width, rows, dtype = self._shape.hidden_size, len(step.last), self.decoders[0].dtype
        logits = receive(home, torch.zeros((rows, self._shape.vocab_size), device=self._device))
        if step.taps is None:
            return PartsOutput(logits)
        hidden = receive(home, torch.zeros((rows, width), dtype=dtype, device=self._device))
        like = torch.zeros((len(step.tokens), len(step.taps) * width), dtype=dtype, device=self._device)
        return PartsOutput(logits, hidden, receive(home, like) if step.taps else None)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `tokens`, each as the rank that holds it has it."""
        own_TH = torch.zeros(
            (len(tokens), self._shape.hidden_size), dtype=self._embed[0].dtype, device=tokens.device
        )
        for part, embed in zip(self.own, self._embed, strict=True):
            here = (tokens >= part.vocab.start) & (tokens < part.vocab.stop)
            own_TH[here] = functional.embedding(tokens[here] - part.vocab.start, embed)
        return self.decoders[0].scaled(self._vocab.gather_embedded(tokens, own_TH))

    def _all_logits(self, x_TH: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of all ranks' vocabulary on the stage's first rank."""
        return self._vocab.gather_logits(
            torch.cat([decoder.logits(x_TH) for decoder in self.decoders], dim=1)
        )


def _taps_before(step: PartsStep, layer: int) -> list[int]:
    return [tap for tap in step.taps or () if tap < layer]
