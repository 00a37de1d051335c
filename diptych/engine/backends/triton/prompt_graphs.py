"""Short prompt steps recorded as CUDA graphs: one launch in place of some four hundred.

Launching a step eagerly takes the host 10 ms and more whatever its length, which is longer than a GPU
computes up to some 500 tokens. A step of `n` tokens runs in the smallest bucket that holds them; the tokens
that are too many are padding. Blocks are written and read through tables, and through the distance of their
memory from an anchor, all of which lie in static buffers: a graph knows no address of a pool, so that it
serves every pool of the layout, also one that is mapped later.

What is recorded ends with the last norm. The few rows whose logits are wanted are multiplied and sampled
eagerly: the host launches that while the device computes the layers.

An abort reaches the device between layers: a second stream marks the sequence's tokens as written nowhere.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from diptych.engine.backends.triton.cuda_graph import GraphCapture, Work, capture_for
from diptych.engine.backends.triton.decode_buffers import BLOCKS, of_table
from diptych.engine.backends.triton.device_wait import LONG_TOKENS
from diptych.engine.backends.triton.forward_pass import ForwardPass
from diptych.engine.backends.triton.packed_step import NO_BLOCK, ChunkRows, Group, PackedStep, TableRows
from diptych.engine.backends.triton.prompt_buffers import STARTS, TABLES, PromptFields
from diptych.engine.backends.triton.recurrent.step_states import PackedStates
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVLayout

_log = logging.getLogger(__name__)

MOST_TOKENS = 512
"""Longer steps take the device longer than the host needs to launch them."""
_BUCKETS = (16, 32, 64, 128, 192, 256, 384, MOST_TOKENS)
_SEVERAL = 8
"""Most sequences of a recorded step that has more than one."""
_CONTEXT_TOKENS = {1: 16_384, _SEVERAL: 8_192}
"""Most tokens of all contexts together, by the sequences of the recording: programs are launched for so many,
and those beyond the contexts end at once.
"""
RECORDING_S = 6.0
"""Time after which no further step is recorded: what is left stays eager."""
_WATCH_S = 2e-4
_FIRST = -1
"""Priority of a stream before those of steps; torch takes any below 0 for a higher one."""


def token_buckets(most_tokens: int) -> list[int]:
    """Return the numbers of tokens to record, up to `most_tokens`."""
    return sorted({n for n in _BUCKETS if n < most_tokens} | {most_tokens})


def log_late(count: int, seconds: float) -> None:
    """Log that time ended the recordings after `count` of them."""
    _log.warning("%d prompt steps were recorded in %.0f s: others are eager", count, seconds)


@dataclass(frozen=True)
class PromptStep:
    """A recorded step that has been launched."""

    hidden: torch.Tensor
    """`[tokens, hidden]` behind the last norm, until the next step."""
    logit_rows: torch.Tensor
    """int64 on the device: rows of `hidden` after which logits are wanted, in the order of the batch."""
    logit_owners: tuple[int, ...]
    """The sequence of each."""
    states: PackedStates | None
    """Recurrent states of the step, if there are any."""
    watch: Callable[[], None] | None
    """Waits for all that is queued and brings aborts to the device meanwhile; None: wait as for any step."""


@dataclass(frozen=True)
class _Recorded:
    replay: Work
    hidden: torch.Tensor


class PromptGraphs:
    """Recorded prompt steps of one model over memories of one layout."""

    def __init__(
        self, layers: ForwardPass, layout: KVLayout, most_tokens: int, capture: GraphCapture | None = None
    ) -> None:
        """Take the memory that steps of up to `most_tokens` tokens need; nothing is recorded yet."""
        device, context = layers.weights.device, layers.shape.max_context
        self._layers, self._layout = layers, layout
        self._capture = capture if capture is not None else capture_for(device)
        self._buckets = token_buckets(most_tokens)
        self._contexts = {n: min(tokens, n * context) for n, tokens in _CONTEXT_TOKENS.items()}
        width = layout.blocks_for(min(context, max(self._contexts.values())))
        self._fields = PromptFields(most_tokens, _SEVERAL, width, layout, device)
        self._buffers = layers.buffers(most_tokens)
        # Of the highest priority: the few bytes of an abort are not to wait behind the step that they stop.
        self._side = torch.cuda.Stream(device, priority=_FIRST) if device.type == "cuda" else None
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        """Steps by tokens and sequences."""
        layers.rotary.reach(context)  # a graph keeps the table that it was recorded with

    @property
    def count(self) -> int:
        """Number of recorded steps."""
        return len(self._recorded)

    @property
    def planned(self) -> list[tuple[int, int]]:
        """Steps to record by tokens and sequences: of one sequence, then of several, the largest first."""
        return [(tokens, sequences) for sequences in self._contexts for tokens in reversed(self._buckets)]

    def record(self, seconds: float = RECORDING_S) -> None:
        """Record the `planned` steps; stop after `seconds`.

        A step that cannot be recorded is computed eagerly, as those that are not there in time.
        """
        end = time.monotonic() + seconds
        for number in range(len(self.planned)):
            if time.monotonic() > end:
                log_late(self.count, seconds)
                return
            try:
                self.record_one(number)
            except RuntimeError as error:
                self.drop(number, str(error))
                return

    def record_one(self, number: int) -> None:
        """Record the step of this number among the `planned` ones. Raises RuntimeError."""
        tokens, sequences = self.planned[number]
        self._fields.clear()  # what is recorded is computed: of padding alone
        self._recorded[tokens, sequences] = self._record(tokens, sequences)

    def drop(self, number: int, why: str) -> None:
        """Compute the step of this number eagerly, whether or not it was recorded, and log why."""
        tokens, _ = self.planned[number]
        _log.warning("a prompt step of %d tokens cannot be recorded: %s", tokens, why)
        self._recorded.pop(self.planned[number], None)

    def accepts(self, sequences: Sequence[SequenceStep]) -> bool:
        """Return whether a batch is a step that was recorded."""
        memory, context = sequences[0].memory, self._layers.shape.max_context
        return (
            self._key(sequences) in self._recorded
            and self._fields.fits(memory)
            and all(
                step.memory is memory
                and step.parents is None
                and step.adapter is None
                and not step.embeddings
                and step.grid is None
                and step.start + len(step.token_ids) <= context
                for step in sequences
            )
        )

    def launch(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> PromptStep:
        """Launch a step that `accepts` accepted; the one before has been waited for."""
        tokens = sum(len(step.token_ids) for step in sequences)
        recorded = self._recorded[self._key(sequences)]
        known = set() if abort is None else set(np.flatnonzero(abort.words).tolist())
        spans = self._fields.fill(sequences, abort)
        self._fields.upload(len(sequences))
        watched = abort is not None and self._side is not None and tokens >= LONG_TOKENS
        uploaded = torch.cuda.Event() if watched else None
        if uploaded is not None:
            uploaded.record()
        recorded.replay()
        owners = tuple(number for number, step in enumerate(sequences) for _ in range(step.logit_rows))
        watch = None
        if abort is not None and uploaded is not None:
            watch = partial(self._watch, abort, known, spans, uploaded)
        return PromptStep(
            recorded.hidden[:tokens],
            self._fields["logit_rows"][: len(owners)],
            owners,
            self._fields.states(tokens, len(sequences)),
            watch,
        )

    def _key(self, sequences: Sequence[SequenceStep]) -> tuple[int, int]:
        """Return tokens and sequences of the recording that holds a batch; zeros if there cannot be one."""
        tokens = sum(len(step.token_ids) for step in sequences)
        number = 1 if len(sequences) == 1 else _SEVERAL
        context = sum(step.start for step in sequences) + tokens
        if tokens > self._buckets[-1] or len(sequences) > number or context > self._contexts[number]:
            return 0, 0
        return self._buckets[bisect_left(self._buckets, tokens)], number

    def _record(self, tokens: int, sequences: int) -> _Recorded:
        fields, buffers, layers = self._fields, self._buffers.rows(tokens), self._layers
        windows, states = self._layout.windows, fields.states(tokens, sequences)
        tables = 1 if windows is None or states is not None else 1 + windows.tables
        step = PackedStep(
            tokens=fields["tokens"][:tokens],
            positions=fields["positions"][:tokens],
            lanes=fields["lanes"][:tokens],
            tables=tuple(self._table_rows(table, tokens, sequences) for table in range(tables)),
            places=() if windows is None else windows.places,
            states=states,
            recorded=True,
        )
        found: list[torch.Tensor] = []

        def work() -> None:
            # Attention leaves the rows of padding as they are: nothing that is not finite may be there.
            buffers.clear_mixed()
            hidden = layers.hidden(step, buffers, None)
            assert hidden is not None  # it cannot be aborted
            found[:] = [hidden]

        replay = self._capture.capture(work)
        return _Recorded(replay, found[0])

    def _table_rows(self, table: int, tokens: int, sequences: int) -> TableRows:
        """Return the rows of a step as the layers of one table see them."""
        fields, every, windows = self._fields, slice(0, tokens), self._layout.windows
        context = self._contexts[sequences]
        if table and windows is not None:
            context = min(context, tokens + sequences * (windows.window + self._layout.block_size))
        chunks = ChunkRows(
            every,
            fields[of_table(TABLES, table)][:sequences],
            fields[of_table(STARTS, table)][:sequences],
            fields["offsets"][: sequences + 1],
            max_tokens=tokens,
            context_tokens=context,
        )
        groups = (Group(fields.anchor, every, None, (chunks,), fields["base"]),)
        return TableRows(fields[of_table(BLOCKS, table)][:tokens], groups)

    def _watch(
        self, abort: AbortWords, known: set[int], spans: Sequence[slice], uploaded: torch.cuda.Event
    ) -> None:
        """Wait for what is queued on the current stream; sequences that are aborted, beside those `known`
        when the step was laid out, write nothing from the next layer on.
        """
        assert self._side is not None
        current, done = torch.cuda.current_stream(), torch.cuda.Event()
        done.record()
        self._side.wait_event(uploaded)
        states = self._fields.states(self._buckets[-1], _SEVERAL)
        while not done.query():
            for number in set(np.flatnonzero(abort.words).tolist()) - known:
                known.add(number)
                with torch.cuda.stream(self._side):
                    for block_ids in self._fields.written:
                        block_ids[spans[number]].fill_(NO_BLOCK)
                    if states is not None:
                        states.abort_rows(spans[number])
                current.wait_stream(self._side)  # the next upload comes after it
            time.sleep(_WATCH_S)
