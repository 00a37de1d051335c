"""Decode steps captured as CUDA graphs and replayed: one launch in place of some four hundred.

A step of `n` rows runs in the smallest bucket that holds them; the rows that are too many are padding. Block
tables always have the width of the model's whole context: the attention kernel launches what fills the chip,
whatever the width. Sampling is part of the graph, so that one number a row comes back; the logits stay on the
device, for those rows whose logits processors need them.

A step may be launched while the one before is being computed. Its tokens may be that one's, which then never
leave the device; what the host lays out for it goes into the other of two copies.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from diptych.engine.backends.triton.cuda_graph import CaptureFailed, GraphCapture, Work, capture_for
from diptych.engine.backends.triton.decode_buffers import (
    BLOCKS,
    TURNS,
    WINDOW_LENGTHS,
    BlockTables,
    RowFields,
    of_table,
)
from diptych.engine.backends.triton.device_wait import StepNap
from diptych.engine.backends.triton.forward_pass import ForwardPass
from diptych.engine.backends.triton.packed_step import DecodeRows, Group, PackedStep, TableRows
from diptych.engine.backends.triton.recurrent.page_buffers import PageBuffers
from diptych.engine.batch import AbortWords, DecodeRecording, SequenceStep, StepOutput, window_cuts
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.sampling import Sampled, SampleFailure, SampleRow
from diptych.engine.sampling.sample import NOT_FINITE

_log = logging.getLogger(__name__)

_NOT_FINITE = -1
"""Mark in place of a token, as kernels/gpu/sample.py has it: the row's logits are not finite."""


def batch_buckets(max_batch: int) -> list[int]:
    """Return the numbers of rows to capture: 1, 2, 4, then every eighth up to `max_batch`."""
    return sorted({n for n in (1, 2, 4, *range(8, max_batch, 8)) if n < max_batch} | {max_batch})


class DecodeGraphs:
    """Captured decode steps of one model over one KV memory."""

    def __init__(
        self,
        layers: ForwardPass,
        max_batch: int,
        block_size: int,
        capture: GraphCapture | None = None,
        *,
        windows: WindowGroups | None = None,
        gives_hidden: bool = False,
    ) -> None:
        """Take the memory that steps of up to `max_batch` rows need; nothing is captured yet.

        `windows` are those of the layout. With `gives_hidden` outputs have the rows behind the final norm.
        """
        shape, device = layers.shape, layers.weights.device
        self._layers = layers
        self._capture = capture if capture is not None else capture_for(device)
        self._max_batch = max_batch
        self._buckets = batch_buckets(max_batch)
        self._windows = windows
        width = -(-shape.max_context // block_size)
        widths = [width]
        self._pages: PageBuffers | None = None
        if windows is not None and shape.recurrent_layers:
            self._pages = PageBuffers(max_batch, windows.tables, device, TURNS)
        elif windows is not None:
            widths += [min(width, windows.span(1, block_size))] * windows.tables
        self._fields = RowFields(max_batch, device, len(widths))
        self._tables = [BlockTables(max_batch, columns, device) for columns in widths]
        self._buffers = layers.buffers(max_batch)
        self._logits = torch.empty((max_batch, shape.vocab_size), dtype=torch.float32, device=device)
        self._tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._answers = torch.zeros((TURNS, max_batch), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._hidden: torch.Tensor | None = None  # on the host
        if gives_hidden:
            size = (TURNS, max_batch, shape.hidden_size)
            self._hidden = torch.zeros(size, dtype=layers.weights.dtype, pin_memory=device.type == "cuda")
        self._turn = 0
        self._nap = StepNap()
        self._waiting: list[LaunchedStep | None] = [None] * TURNS
        self._scratch = layers.operators.make_scratch(
            max_batch, shape.num_heads, shape.head_dim, width * block_size, device
        )
        self._sample_scratch = layers.operators.make_sample_scratch(max_batch, shape.vocab_size, device)
        layers.rotary.reach(shape.max_context)  # a graph keeps the table that it was captured with
        self._memory: KVMemory | None = None
        self._graphs: dict[DecodeRecording, Work] = {}
        self._dropped: set[DecodeRecording] = set()

    @property
    def count(self) -> int:
        """Number of graphs that there are, or will be."""
        return len(self._buckets)

    @property
    def planned(self) -> list[DecodeRecording]:
        """Steps to record before the first one: those without adapters, the largest first.

        Its kernels and its share of the graphs' memory serve the others.
        """
        return [DecodeRecording(rows, adapted=False) for rows in reversed(self._buckets)]

    def use(self, memory: KVMemory) -> None:
        """Let steps be recorded over `memory`. Raises ValueError for other windows than planned."""
        if memory.layout.windows != self._windows:
            raise ValueError("decode steps were planned for blocks of another layout")
        self._memory = memory

    def record(self, recording: DecodeRecording) -> None:
        """Record a step over the memory in use. Raises CaptureFailed."""
        turn = (self._turn + 1) % TURNS
        if self._memory is None:
            raise RuntimeError("decode steps have no memory")
        self._check_collected(turn)
        kept = self._fields.sampled.clone()  # the step that is launched next may follow these
        self._clear(turn)  # what is captured is computed: of rows that write nowhere
        scratch = None
        if recording.adapted:
            if self._layers.adapters is None:
                raise RuntimeError("adapters were not allowed")
            scratch = self._layers.adapters.scratch(recording.rows)
        try:
            self._graphs[recording] = self._capture.capture(self._work(recording.rows, self._memory, scratch))
        finally:
            self._fields.sampled.copy_(kept)

    def drop(self, recording: DecodeRecording, why: str) -> None:
        """Compute steps by larger recordings or eagerly, whether or not this one was made, and log why."""
        _log.warning("a decode step of %d rows cannot be recorded: %s", recording.rows, why)
        self._graphs.pop(recording, None)
        self._dropped.add(recording)

    def record_or_drop(self, recording: DecodeRecording) -> None:
        """Record a step, or drop it where it cannot be captured."""
        try:
            self.record(recording)
        except CaptureFailed as error:
            self.drop(recording, str(error))

    def missing(self, sequences: Sequence[SequenceStep]) -> DecodeRecording | None:
        """Return what is to be recorded before a step is launched; None if nothing is.

        Steps with adapters are recorded when the first one comes: most servers have none.
        """
        recording = self._recording(sequences)
        if recording is None or recording in self._graphs or not self.accepts(sequences):
            return None
        return recording

    def _recording(self, sequences: Sequence[SequenceStep]) -> DecodeRecording | None:
        """Return the smallest recording that holds a batch, made or to be made; None if there is none."""
        adapted = any(step.adapter is not None for step in sequences)
        holding = self._buckets[bisect_left(self._buckets, len(sequences)) :]
        fitting = (DecodeRecording(rows, adapted) for rows in holding)
        return next((one for one in fitting if one not in self._dropped), None)

    def accepts(self, sequences: Sequence[SequenceStep]) -> bool:
        """Return whether a batch is a decode step that is or can be recorded."""
        return self._recording(sequences) is not None and all(
            step.memory is self._memory
            and len(step.token_ids) == 1
            and step.wants_logits
            and not step.embeddings
            and step.grid is None
            and step.start < self._layers.shape.max_context
            and (step.follows is None or 0 <= step.follows < self._max_batch)
            for step in sequences
        )

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        draws: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> LaunchedStep:
        """Begin a step of which nothing is `missing`. A word of `abort` that is set later changes nothing: a
        step is as short as one layer of a prompt.

        At most two are begun and not collected; the first of them leaves no logits to the host.
        """
        turn = (self._turn + 1) % TURNS
        self._check_collected(turn)
        self._turn = turn
        count, recording = len(sequences), self._recording(sequences)
        if recording is None or recording not in self._graphs:
            raise RuntimeError("a decode step was launched that was not recorded")
        rows, graph = recording.rows, self._graphs[recording]
        cuts = window_cuts(sequences)
        for table, seen in zip(self._tables, (sequences, *cuts), strict=True):
            table.fill(turn, seen)
            table.upload(turn, rows)
        self._fields.fill(turn, sequences, draws, cuts)
        self._fields.abort_rows(turn, abort, count)
        self._fields.upload(turn)
        if self._pages is not None:
            self._pages.fill(turn, sequences, abort)
            self._pages.upload(turn, rows)
        graph()
        self._answers[turn, :count].copy_(self._fields.sampled[:count], non_blocking=True)
        if self._hidden is not None:
            self._hidden[turn, :count].copy_(self._buffers.normed[:count], non_blocking=True)
        done = torch.cuda.Event() if self._fields.sampled.is_cuda else None
        wait = None
        if done is not None:
            done.record()
            wait = partial(self._nap.wait, rows, time.monotonic(), done)
        left = [row for row, draw in enumerate(draws) if draw is None]
        ready = done.query if done is not None else lambda: True
        launched = LaunchedStep(left, ready, lambda: self._read(turn, count, left, wait))
        self._waiting[turn] = launched
        return launched

    def _check_collected(self, turn: int) -> None:
        """Check that no step that is on its way has its fields at `turn`, or its logits for the host."""
        if any(step is not None and step.left for step in self._waiting):
            raise RuntimeError("a step was launched over the logits of the one before")
        if self._waiting[turn] is not None:
            raise RuntimeError(f"{TURNS} steps are launched and not collected")

    def _read(self, turn: int, count: int, left: list[int], wait: Callable[[], None] | None) -> StepOutput:
        """Wait for a step, and for no more than its few numbers; `left` are the rows that sampled nothing."""
        self._waiting[turn] = None
        if wait is not None:
            wait()
        tokens: list[Sampled | SampleFailure | None] = list(
            map(sampled, self._answers[turn, :count].tolist())
        )
        if self._pages is not None and self._memory is not None and NOT_FINITE in tokens:
            # Of a step that was launched meanwhile, if there is one: such a row is lost there, too.
            self._pages.states(count, self._memory).log_lost()
        for row in left:
            tokens[row] = None
        hidden = None if self._hidden is None else self._hidden[turn, :count].clone().float()
        return StepOutput(tokens, self._logits_of(left, count), hidden)

    def _logits_of(self, rows: list[int], count: int) -> torch.Tensor:
        if not rows:
            return torch.empty((0, self._layers.shape.vocab_size))
        chosen = self._logits[:count] if len(rows) == count else self._logits[rows]
        return chosen.cpu() if chosen.is_cuda else chosen.clone()

    def _clear(self, turn: int) -> None:
        self._fields.clear(turn)
        if self._pages is not None:
            self._pages.clear(turn)

    def _work(self, rows: int, memory: KVMemory, adapter_scratch: torch.Tensor | None = None) -> Work:
        """Return the step for so many rows, as work to capture; with scratch they may have adapters."""
        layers, fields, every = self._layers, self._fields, slice(0, rows)
        lengths = ["lengths", *[WINDOW_LENGTHS] * (len(self._tables) - 1)]
        tables = (
            TableRows(
                fields[of_table(BLOCKS, number)][:rows],
                (Group(memory.data, every, DecodeRows(every, table.device[:rows], fields[name][:rows]), ()),),
            )
            for number, (table, name) in enumerate(zip(self._tables, lengths, strict=True))
        )
        step = PackedStep(
            tokens=self._tokens[:rows],
            positions=fields["positions"][:rows],
            lanes=fields["lanes"][:rows],
            tables=tuple(tables),
            places=() if self._windows is None else self._windows.places,
            adapters=None if adapter_scratch is None else fields["adapters"][:rows],
            adapter_scratch=adapter_scratch,
            states=None if self._pages is None else self._pages.states(rows, memory),
            recorded=True,
        )
        by = {name: fields[name][:rows] for name in SAMPLING_FIELDS}
        buffers, logits, tokens = self._buffers.rows(rows), self._logits[:rows], fields.sampled[:rows]
        sources = fields["sources"][:rows]

        def work() -> None:
            torch.index_select(fields.known, 0, sources, out=step.tokens)
            step.tokens.clamp_(min=0)  # a row that sampled nothing goes on with any token, which is not read
            layers.agree(step.tokens)
            hidden = layers.hidden(step, buffers, self._scratch)
            assert hidden is not None  # it cannot be aborted
            layers.logits(hidden, logits)
            if layers.leads:
                sample_tokens(layers, logits, by, self._sample_scratch, tokens)

        return work


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step on its way; see `diptych.engine.batch.Launched`."""

    left: Sequence[int]
    """Rows whose logits the host wants."""
    done: Callable[[], bool]
    collect: Callable[[], StepOutput]


SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seeds", "counters")


def sample_tokens(
    layers: ForwardPass, logits: torch.Tensor, by: dict[str, torch.Tensor], scratch: Any, out: torch.Tensor
) -> torch.Tensor:
    """Draw a token for each row of `logits` on the device, into `out`, int64; `by` has DRAW_FIELDS."""
    return layers.operators.sample(
        logits,
        by["temperature"],
        by["top_k"],
        by["top_p"],
        by["min_p"],
        by["seeds"],
        by["counters"],
        scratch=scratch,
        out=out,
    )


def sampled(token: int) -> Sampled | SampleFailure:
    """Return the result that a number of `sample_tokens` means."""
    return NOT_FINITE if token == _NOT_FINITE else Sampled(token)
