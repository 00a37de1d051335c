"""The torch backend of one rank of a group, or of one process that computes all parts by itself.

Ranks of one host map the same KV memory, and each reads and writes the KV heads of its own parts. Where two
ranks have a part each of one KV head, or of attention over one latent, both write the same bytes to the same
place. A stage of a pipeline has a view of its layers of the same blocks. A rank with a memory of its own
holds no more of each block than its share (diptych/engine/parallel/kv_shares.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.adapters.part_adapter import part_adapters
from diptych.engine.backends.lacks import lacks_adapters, lacks_trees
from diptych.engine.backends.torch.adapters import TorchAdapters
from diptych.engine.backends.torch.backend import flatten, on_device
from diptych.engine.backends.torch.decoder import Attend
from diptych.engine.backends.torch.hidden_rows import HiddenRows
from diptych.engine.backends.torch.parts_decoder import PartsDecoder, PartsStep
from diptych.engine.backends.torch.row_groups import Chunk, Decodes, ScoreRule, group_rows
from diptych.engine.batch import AbortWords, SequenceStep, StepOutput
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.kv_shares import KVShare
from diptych.engine.parallel.parts import Part
from diptych.engine.parallel.pipeline import Links
from diptych.engine.parallel.stage_images import rows_of_stage
from diptych.engine.parallel.stages import Stage
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.weights import Weights


class PartsBackend:
    """Executes a rank's parts of steps; every rank of a group must be given the same steps in one order."""

    def __init__(
        self,
        shape: ModelShape,
        parts: Sequence[Part],
        weights: Sequence[Weights],
        links: Links,
        stage: Stage,
        *,
        stop_word: StopWord,
        threads: int,
        device: torch.device | str = "cpu",
        held: KVShare | None = None,
    ) -> None:
        """Prepare the decoder of the parts that `links.ranks.rank` computes, whose `weights` these are in the
        layers of `stage`. Memories hold whole blocks, or the share `held` of each.

        Every step has `threads` cores: with others a library might add in another order.
        """
        self._shape, self._threads = shape, threads
        self._device, self._stop_word = torch.device(device), stop_word
        self._leads, self._is_alone = links.leads, links.is_alone
        # Hosts that wait for no exchange are at other layers when the word is written.
        self._ends_early = links.is_alone or not links.on_device
        self._stage, self._layers = stage, stage.layers
        self._origin = (0, 0) if held is None else (held.layers.start, held.heads.start)
        weights = [on_device(own, self._device) for own in weights]
        self._decoder = PartsDecoder(shape, parts, weights, links, stage)
        self._adapters = [TorchAdapters(self._device) for _ in weights]
        self._rules = [
            [
                ScoreRule(shape.window(index), shape.score_scale, shape.score_cap, layer.sinks)
                for index, layer in zip(stage.layers, own.layers, strict=True)
            ]
            for own in weights
        ]

    def set_threads(self, threads: int) -> None:
        """Use the cores of every step in torch calls from the calling thread, whatever `threads` says."""
        torch.set_num_threads(self._threads)

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`."""
        return lacks_adapters(self._shape)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `AdapterBackend.prepare_adapter`: returns what each own part has of it."""
        return part_adapters(adapter, self._shape, self._decoder.own, self._layers)

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `AdapterBackend.set_adapter`."""
        assert prepared is None or isinstance(prepared, tuple)
        for number, adapters in enumerate(self._adapters):
            adapters.set(slot, None if prepared is None else prepared[number])

    def give_hidden_rows(self) -> HiddenRows:
        """See `HiddenRowsBackend.give_hidden_rows`."""
        return HiddenRows(self)

    def give_features(self, layers: Sequence[int]) -> HiddenRows:
        """See `FeatureBackend.give_features`."""
        return HiddenRows(self, layers)

    def lacks_trees(self) -> str | None:
        """See `TreeBackend.lacks_trees`."""
        return lacks_trees(self._shape)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`. Rank 0 alone has an `abort`, and returns logits; the others return no rows.

        The words are read between layers to end a step that no sequence wants any more, but not where ranks
        exchange numbers on the device. Else a sequence that is aborted is written to the end of the step, and
        its rows are NaN.
        """
        return self.forward_with_features(sequences, abort, None).logits

    def forward_with_features(
        self, sequences: Sequence[SequenceStep], abort: AbortWords | None, taps: Sequence[int] | None
    ) -> StepOutput:
        """Return what `forward` does, and what `PartsStep.taps` asks for if not all sequences were aborted;
        every rank is asked for the same.
        """
        if self._is_alone:
            self._stop_word.reset()  # in a group rank 0 does, before it sends the plan
        with torch.inference_mode():
            step = self._step_of(sequences, taps)

            def wanted(layer: int) -> bool:
                if self._ends_early and abort is not None and abort.all_aborted():
                    self._stop_word.stop_before(layer + 1)
                return not self._stop_word.stops(layer)

            def finished() -> bool:
                return not self._stop_word.stops(self._shape.num_layers - 1)

            output = self._decoder.forward(step, wanted, finished)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # a handoff of the step's blocks knows no device
            if output is None:
                rows = len(step.last) if self._leads else 0  # what other ranks return is not looked at
                return StepOutput.logits_only(torch.full((rows, self._shape.vocab_size), torch.nan))
            logits = output.logits.cpu()
            if abort is not None:
                owners = [i for i, step in enumerate(sequences) for _ in range(step.logit_rows)]
                logits[[abort.is_aborted(i) for i in owners]] = torch.nan
            hidden, features = _to_host(output.hidden), _to_host(output.features)
            return StepOutput([None] * len(logits), logits, hidden, features)

    def follow(
        self, sequences: Sequence[SequenceStep], greedy: bytes, taps: Sequence[int] | None = None
    ) -> bool:
        """Compute this rank's share of a step of rank 0's, and return True: rank 0 waits for a word that it
        is over. Raises GroupBroken.
        """
        self.forward_with_features(sequences, None, taps)
        return True

    def _step_of(self, sequences: Sequence[SequenceStep], taps: Sequence[int] | None) -> PartsStep:
        tokens, positions, last = (numbers.to(self._device) for numbers in flatten(sequences))
        groups = group_rows(sequences)
        attends = [
            self._attention([self._view(group, part.kv_heads) for group in groups], rules)
            for part, rules in zip(self._decoder.own, self._rules, strict=True)
        ]
        changes = [adapters.of_step(sequences) for adapters in self._adapters]
        given = rows_of_stage(sequences, self._stage, self._shape.hidden_size)
        return PartsStep(tokens, positions, last, attends, changes, given, taps)

    def _view(self, group: Chunk | Decodes, kv_heads: range) -> Chunk | Decodes:
        """Return a group with a view of the stage's layers and of these KV heads of all blocks."""
        layer, head = self._origin
        share = KVShare(
            range(self._layers.start - layer, self._layers.stop - layer),
            range(kv_heads.start - head, kv_heads.stop - head),
        )
        return replace(group, blocks=share.of(group.blocks))

    def _attention(self, groups: Sequence[Chunk | Decodes], rules: Sequence[ScoreRule]) -> Attend:
        """Return the attention of one part over the step's groups."""
        latent, scale = self._shape.latent, self._shape.score_scale

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if latent is not None:
                mixed = q.new_zeros(*q.shape[:-1], latent.rank)
                for group in groups:
                    group.attend_latents(layer, scale, q, k, mixed)
                return mixed
            mixed = torch.zeros_like(q)
            for group in groups:
                group.attend(layer, rules[layer], q, k, v, mixed, None)
            return mixed

        return attend


def _to_host(rows: torch.Tensor | None) -> torch.Tensor | None:
    return None if rows is None else rows.float().cpu()
