"""The native step of one rank of a group, or of one process that computes all parts by itself.

Ranks of one host map the same KV memory, and each reads and writes the KV heads of its own parts. Within a
step the ranks exchange sums in memory that all of them map (kernels/cpu/rank_exchange.h), and a step ends for
each of them once all have written their keys and values. So nothing has to be said at its end.

Stages of a pipeline pass residual streams on between their steps (diptych/engine/parallel/pipeline.py). A
stage has a view of its layers of the same blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.batch import Passing, positions_of
from diptych.engine.backends.native.every_row import has_every_row, is_dropped
from diptych.engine.backends.native.rotations import on_grids
from diptych.engine.backends.native.share import Share
from diptych.engine.batch import AbortWords, Launched, SequenceStep, StepOutput
from diptych.engine.parallel.pipeline import Links, receive, receive_with, send, send_with
from diptych.engine.sampling import SampleRow

_MOST_LAUNCHED = 2
"""Steps that a model computes or is about to; see `LaunchingBackend.launch`."""


class NativePartsBackend:
    """Executes a rank's parts of steps; every rank of a group must be given the same steps in one order."""

    def __init__(
        self,
        share: Share,
        dtype: torch.dtype,
        links: Links,
        *,
        threads: int,
        instruction_set: str | None = None,
    ) -> None:
        """Pack the weights of `share`, which may be freed afterwards. Every step has `threads` cores. `links`
        are the ends of a pipeline that this process holds; its ranks exchange within a step.

        Raises NativeUnavailable.
        """
        self._step = NativeBackend(share.whole, share, dtype, instruction_set)
        self._step.set_threads(threads)
        self._links, self._stage, self._shape = links, share.stage, share.whole
        self._is_whole = share.stage.is_first and share.stage.is_last
        self._followed: deque[Launched] = deque()
        self._taps: tuple[int, ...] | None = None
        self._every_row = False

    @property
    def mixes_chunks(self) -> bool:
        """See `MixedStepBackend`: weights are read once for all rows of a step."""
        return True

    @property
    def completions(self) -> int:
        """See `CompletionFdBackend.completions`."""
        return self._step.completions

    def set_threads(self, threads: int) -> None:
        """Keep the cores that the rank has from the start."""

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`."""
        return self._step.allow_adapters(slots, max_rank)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `AdapterBackend.prepare_adapter`: packs what this rank's parts have of it."""
        return self._step.prepare_adapter(adapter)

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `AdapterBackend.set_adapter`. Waits for the steps that this rank follows: rank 0 knows of their
        ends before it does.
        """
        self._collect(leave=0)
        self._step.set_adapter(slot, prepared)

    @property
    def taps(self) -> tuple[int, ...] | None:
        """Layers whose features outputs have beside hidden rows; None: outputs have neither."""
        return self._taps

    def give_hidden_rows(self) -> NativePartsBackend:
        """See `HiddenRowsBackend.give_hidden_rows`: from the next step on."""
        self._keep(())
        return self

    def give_features(self, layers: Sequence[int]) -> NativePartsBackend:
        """See `FeatureBackend.give_features`: from the next step on. Raises ValueError as that of a whole
        model does.
        """
        self._step.give_features(layers)
        self._every_row = self._shape.num_layers in layers
        self._taps = None  # the step has all layers for its own yet
        self._keep(() if self._every_row else layers)
        return self

    def _keep(self, taps: Sequence[int] | None) -> None:
        """Have this rank's steps keep what outputs are to have, those of its own layers."""
        if taps is None or tuple(taps) == self._taps:
            return
        self._taps, own = tuple(taps), self._stage.layers
        self._step.tap([tap - own.start for tap in taps if tap in own])
        if self._links.leads if self._is_whole else self._stage.is_last and self._links.home is not None:
            self._step.give_hidden_rows()

    def lacks_trees(self) -> str | None:
        """See `TreeBackend.lacks_trees`."""
        return self._step.lacks_trees()

    def widens(self, sequences: Sequence[SequenceStep]) -> bool:
        """Return whether a step is to be computed with a row of logits for each token (every_row.py)."""
        return self._every_row and not has_every_row(sequences)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`. Rank 0 alone has an `abort`: once all sequences are aborted every rank of
        its stage stops before the same layer. Before that, the other ranks write one that is aborted.
        """
        if self._is_whole:
            return self._step.forward(sequences, abort)
        rows = sum(step.logit_rows for step in sequences)
        return self._forward_stage(sequences, abort, bytes(rows), self._taps).logits

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """See `SamplingBackend.forward_and_sample`. The stages of a pipeline give the logits of all rows."""
        if self._is_whole:
            return self._step.forward_and_sample(sequences, rows, abort)
        output = self._forward_stage(sequences, abort, self.greedy(rows), self._taps)
        return replace(output, features=output.hidden) if self._every_row else output

    def greedy(self, rows: Sequence[SampleRow | None]) -> bytes:
        """Return a byte for each row of a step's logits, 1 where its likeliest token is wanted: by the stages
        of a pipeline where the row is dropped.
        """
        if self._is_whole:
            return bytes([row is not None and self.samples_on_device(row) for row in rows])
        return bytes(map(is_dropped, rows))

    def samples_on_device(self, row: SampleRow) -> bool:
        """See `LaunchingBackend.samples_on_device`: the likeliest token, and no other."""
        return self._is_whole and self._step.samples_on_device(row)

    def launches(self, sequences: Sequence[SequenceStep], rows: Sequence[SampleRow | None]) -> bool:
        """Return whether `launch` begins this step: none of a pipeline, whose stages wait for each other."""
        return self._is_whole and self._step.launches(sequences, rows)

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """See `LaunchingBackend.launch`."""
        if not self._is_whole:
            return None
        return self._step.launch(sequences, rows, abort)

    def follow(
        self, sequences: Sequence[SequenceStep], greedy: bytes, taps: Sequence[int] | None = None
    ) -> bool:
        """Begin this rank's share of a step of rank 0's, after those that were begun before.

        `greedy` has a byte for each row of logits, 1 where its likeliest token is wanted; `taps` are those of
        rank 0. Returns while the step is computed, once the one before the last is; in a pipeline when it is
        over. False: rank 0 waits for no word of its end. Raises NativeError, GroupBroken.
        """
        self._keep(taps)
        if not self._is_whole:
            self._forward_stage(sequences, None, greedy, taps)
            return False
        alone = on_grids(sequences) or positions_of(sequences) > self._step.positions
        self._collect(leave=0 if alone else _MOST_LAUNCHED - 1)
        if (launched := self._step.follow(sequences, greedy)) is not None:
            self._followed.append(launched)
        return False

    def _collect(self, leave: int) -> None:
        while len(self._followed) > leave:
            self._followed.popleft().collect()

    def _forward_stage(
        self,
        sequences: Sequence[SequenceStep],
        abort: AbortWords | None,
        greedy: bytes,
        taps: Sequence[int] | None,
    ) -> StepOutput:
        """Compute this stage's layers; return the output on the group's first process."""
        links, own, width = self._links, self._stage.layers, self._shape.hidden_size
        like = torch.zeros((sum(len(step.token_ids) for step in sequences), width))
        enters: torch.Tensor | None = None
        features: dict[int, torch.Tensor] = {}
        if links.before is not None:
            before = [tap for tap in taps or () if tap < own.start]
            enters, features = receive_with(links.before, like, before)
        passing = Passing(enters, None if self._stage.is_last else torch.zeros_like(like))
        if passing.leaves is not None:
            sequences = [replace(step, wants_logits=False) for step in sequences]
        asked = greedy if self._stage.is_last else b""
        logits, batch = self._step.forward_stage(sequences, asked, abort, passing)
        if taps and batch.features is not None:
            here = [tap for tap in taps if tap in own]
            features |= zip(here, batch.features.split(width, dim=1), strict=True)
        if links.after is not None and passing.leaves is not None:
            send_with(links.after, passing.leaves, features)  # even if the step has ended: the next one waits
        if self._stage.is_last:
            tapped = torch.cat([features[tap] for tap in taps], dim=1) if taps else None
            return self._send_home(StepOutput([None] * len(greedy), logits, batch.hidden, tapped), taps)
        output = self._from_home(greedy, taps, len(like))
        if abort is not None and abort.all_aborted():
            output.logits.fill_(torch.nan)  # the other stages computed with what there was
        return output

    def _send_home(self, output: StepOutput, taps: Sequence[int] | None) -> StepOutput:
        """Send the output of the last stage to rank 0, from the first rank that has it."""
        if (home := self._links.home) is not None:
            send(home, output.logits)
            if taps is not None and output.hidden is not None:
                send(home, output.hidden)
            if output.features is not None:
                send(home, output.features)
        return output

    def _from_home(self, greedy: bytes, taps: Sequence[int] | None, tokens: int) -> StepOutput:
        """Return the output of the last stage on rank 0; what other ranks return is not looked at."""
        rows, vocab, width = len(greedy), self._shape.vocab_size, self._shape.hidden_size
        logits = torch.zeros((greedy.count(0), vocab))
        if (home := self._links.home) is None:
            return StepOutput([None] * rows, logits)
        logits = receive(home, logits)
        hidden = None if taps is None else receive(home, torch.zeros((rows, width)))
        tapped = receive(home, torch.zeros((tokens, len(taps) * width))) if taps else None
        return StepOutput([None] * rows, logits, hidden, tapped)
