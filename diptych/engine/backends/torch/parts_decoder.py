"""The decoder of one rank: each of its parts is a narrower decoder, and the ranks add their outputs.

Names carry shapes as in decoder.py, and P is the number of all parts. Every product has the shape of a part,
at every degree, and what the parts give is added in their order, in float32. So the same parts give the same
bits on one rank and on many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import functional

from diptych.engine.backends.torch.decoder import Attend, Decoder
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.parts import Part, parts_of_rank
from diptych.engine.weights import Weights


class PartsDecoder:
    """Token ids in, logits of chosen tokens out on rank 0; every rank calls it with the same step."""

    def __init__(
        self,
        shape: ModelShape,
        parts: Sequence[Part],
        weights: Sequence[Weights],
        communicator: Communicator,
    ) -> None:
        """Take all parts of the model, and the weights of those that this rank computes."""
        self._shape, self._communicator = shape, communicator
        dealt = [parts_of_rank(len(parts), rank, communicator.ranks) for rank in range(communicator.ranks)]
        self.own = [parts[number] for number in dealt[communicator.rank]]
        self._decoders = [
            Decoder(part.shape_of(shape), own) for part, own in zip(self.own, weights, strict=True)
        ]
        self._embed = [own.embed for own in weights]
        spans = [range(parts[of[0]].vocab.start, parts[of[-1]].vocab.stop) for of in dealt]
        self._widths = [len(span) for span in spans]
        self._vocab_ends = torch.tensor([span.stop for span in spans], device=weights[0].embed.device)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor,
        attends: Sequence[Attend],
        wanted: Callable[[int], bool],
    ) -> torch.Tensor | None:
        """Return float32 logits `[len(last), vocab]` of the rows `last` of the step; None on other ranks.

        Args:
            attends: attention of each own part.
            wanted: asked before every layer, by its number; it answers all ranks alike. None is returned
                once it says no.
        """
        lead = self._decoders[0]  # norms are the same in all
        angles, growth = lead.angles(positions), lead.growth(positions)
        x_TH = self._embedded(tokens)
        for index, layer in enumerate(lead.layers):
            if not wanted(index):
                return None
            normed = lead.norm(x_TH, layer.input_norm, layer.input_norm_bias)
            attended = self._sum(
                decoder.attention(index, decoder.layers[index], normed, angles, growth, attend, None)
                for decoder, attend in zip(self._decoders, attends, strict=True)
            )
            x_TH = x_TH + lead.added(attended, layer.attention_out_norm)
            if not self._shape.parallel_residual:
                normed = lead.norm(x_TH, layer.post_norm, layer.post_norm_bias)
            fed = self._sum(
                decoder.feed_forward(index, decoder.layers[index], normed, None) for decoder in self._decoders
            )
            x_TH = x_TH + lead.added(fed, layer.feed_forward_out_norm)
        x_TH = lead.norm(x_TH[last], lead.final_norm, lead.final_norm_bias)
        return self._all_logits(x_TH)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `tokens`, each as the rank that holds it has it."""
        own_TH = torch.zeros(
            (len(tokens), self._shape.hidden_size), dtype=self._embed[0].dtype, device=tokens.device
        )
        for part, embed in zip(self.own, self._embed, strict=True):
            here = (tokens >= part.vocab.start) & (tokens < part.vocab.stop)
            own_TH[here] = functional.embedding(tokens[here] - part.vocab.start, embed)
        holders = torch.bucketize(tokens, self._vocab_ends, right=True)
        x_TH = self._communicator.all_gather(own_TH)[holders, torch.arange(len(tokens), device=tokens.device)]
        return self._decoders[0].scaled(x_TH)

    def _sum(self, outputs: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all parts' outputs `[T, H]`, added in the order of the parts."""
        own_PTH = torch.stack(list(outputs))
        every_PTH = self._communicator.all_gather(own_PTH).flatten(0, 1)
        total_TH = every_PTH[0].float()
        for output in every_PTH[1:]:
            total_TH = total_TH + output
        return total_TH.to(own_PTH.dtype)

    def _all_logits(self, x_TH: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of all ranks' vocabulary on rank 0."""
        own = torch.cat([decoder.logits(x_TH) for decoder in self._decoders], dim=1)
        padded = functional.pad(own, (0, max(self._widths) - own.shape[1]))
        gathered = self._communicator.gather(padded)
        if gathered is None:
            return None
        return torch.cat(
            [logits[:, :width] for logits, width in zip(gathered, self._widths, strict=True)], dim=1
        )
