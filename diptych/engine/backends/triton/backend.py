"""The step on a GPU: Triton kernels and library products over packed batches; decode steps as CUDA graphs.

Any batch runs eagerly: several prompts packed, decode rows beside chunks, several memories on the device (the
pools of decode workers on the same GPU, into which a prefill worker computes). A batch of decode rows over
the memory that decode was prepared for replays its graph (decode_graphs.py), and so does a short prompt step
over any memory of the layout for which such steps were recorded (prompt_graphs.py).

Everything is queued on the current stream, and a step has been computed when `forward` returns: a handoff of
its blocks needs no knowledge of the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.backends.torch_only import NO_RECURRENT_ADAPTERS, NO_RECURRENT_TREES
from diptych.engine.backends.triton.batch_invariant import NO_TREES
from diptych.engine.backends.triton.cuda_graph import GraphCapture
from diptych.engine.backends.triton.current_device import current, numbered
from diptych.engine.backends.triton.decode_graphs import DecodeGraphs
from diptych.engine.backends.triton.device_wait import wait_for_stream
from diptych.engine.backends.triton.forward_pass import ForwardPass, StepBuffers
from diptych.engine.backends.triton.launch_throttle import LaunchThrottle
from diptych.engine.backends.triton.layers import Layers
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_step import PlacedStep
from diptych.engine.backends.triton.packed_weights import pack
from diptych.engine.backends.triton.prefill_attention import chosen_operators
from diptych.engine.backends.triton.prompt_graphs import RECORDING_S, PromptGraphs, PromptStep
from diptych.engine.backends.triton.recurrent.mixers import pack_mixer
from diptych.engine.backends.triton.row_sampling import launch_sampling
from diptych.engine.backends.triton.step_plan import MOST_TREE_TOKENS, pack_step
from diptych.engine.batch import (
    AbortWords,
    DecodeRecording,
    Launched,
    SequenceStep,
    StepOutput,
    given_embeddings,
)
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.models.shape import ModelShape
from diptych.engine.sampling import SampleRow
from diptych.engine.weights import Weights


class TritonBackend:
    """Executes steps of one model on one device. One call at a time, from any thread."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        device: torch.device | str,
        operators: Operators | None = None,
        kv_scales: torch.Tensor | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Pack `weights` onto `device`, where keys and values will be: of their dtype, or with `kv_scales`
        (kernels/fp8_cache.py) in FP8.

        `operators` are the Triton kernels unless given, with `batch_invariant` in one order of sums each.
        Raises TritonUnavailable, or UnsupportedModel for weights that they do not multiply.
        """
        self._device, self._shape = numbered(device), shape
        with self._current(), torch.no_grad():
            scales = None if kv_scales is None else kv_scales.to(self._device)
            chosen = operators or chosen_operators(
                shape, self._device, fp8_cache=scales is not None, batch_invariant=batch_invariant
            )
            packed = pack(weights, self._device, partial(pack_mixer, shape))
            layers = Layers(shape, packed, chosen, scales)
        self._begin(layers)

    @classmethod
    def over(cls, layers: ForwardPass) -> TritonBackend:
        """Return a backend that computes with `layers`, on the device of their weights."""
        made = cls.__new__(cls)
        made._device, made._shape = layers.weights.device, layers.shape
        made._begin(layers)
        return made

    def _begin(self, layers: ForwardPass) -> None:
        """Compute with `layers`; nothing is allocated or recorded yet."""
        self._layers = layers
        self._buffers: StepBuffers | None = None
        self._scratch: Any = None
        self._scratch_size = (0, 0)
        self._graphs: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None
        self._gives_hidden = False

    def twin(self) -> TritonBackend:
        """See `TwinBackend.twin`."""
        with self._current(), torch.no_grad():
            return TritonBackend.over(self._layers.twin())

    @property
    def device(self) -> torch.device:
        """Device of weights, keys and values."""
        return self._device

    @property
    def weight_bytes(self) -> int:
        """See `WeighedBackend.weight_bytes`."""
        return self._layers.weights.read_bytes

    @property
    def expert_bytes(self) -> int:
        """See `WeighedBackend.expert_bytes`."""
        return self._layers.weights.expert_bytes

    def set_threads(self, threads: int) -> None:
        """Ignore `threads`: the host only launches."""

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`."""
        if self._shape.recurrent_layers:
            return NO_RECURRENT_ADAPTERS
        self._layers.allow_adapters(slots, max_rank)
        return None

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `AdapterBackend.prepare_adapter`: it comes to the device with its slot."""
        return adapter

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `AdapterBackend.set_adapter`."""
        if self._layers.adapters is None:
            raise RuntimeError("adapters were not allowed")
        with self._current(), torch.no_grad():
            self._layers.adapters.set(slot, prepared)
            if self._device.type == "cuda":
                stream = torch.cuda.current_stream(self._device)
                if stream != torch.cuda.default_stream(self._device):
                    stream.synchronize()  # steps may be on another stream than that of the caller

    def give_hidden_rows(self) -> TritonBackend:
        """See `HiddenRowsBackend.give_hidden_rows`: in what is planned from now on."""
        self._gives_hidden = True
        return self

    def lacks_trees(self) -> str | None:
        """See `TreeBackend.lacks_trees`."""
        if self._shape.recurrent_layers:
            return NO_RECURRENT_TREES
        if self._layers.operators.invariant_linear is not None:
            return NO_TREES
        windows = (self._shape.window(index) for index in range(self._shape.num_layers))
        short = any(window is not None and window < MOST_TREE_TOKENS for window in windows)
        return f"windows of less than {MOST_TREE_TOKENS} tokens know no trees of tokens" if short else None

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`; rows of aborted sequences are NaN."""
        rows = sum(step.logit_rows for step in sequences)
        return self.forward_and_sample(sequences, [None] * rows, abort).logits

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        draws: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """See `SamplingBackend.forward_and_sample`."""
        with self._current(), torch.no_grad():
            if (graphs := self._recorded(sequences)) is not None:
                return graphs.launch(sequences, draws, abort).collect()
            if self._prompts is not None and self._prompts.accepts(sequences):
                return self._replay_prompts(self._prompts.launch(sequences, abort), draws, abort)
            computed = self._compute(sequences, abort)
            if computed is None:
                missing = torch.full((len(draws), self._shape.vocab_size), torch.nan)
                return StepOutput.logits_only(missing)
            logits, hidden = computed
            return replace(launch_sampling(self._layers, logits, draws)(), hidden=hidden)

    def launches(self, sequences: Sequence[SequenceStep]) -> bool:
        """Return whether `launch` begins this step, unless what is missing for it cannot be recorded."""
        return self._graphs is not None and self._graphs.accepts(sequences)

    def missing(self, sequences: Sequence[SequenceStep]) -> DecodeRecording | None:
        """Return the decode step to record before this one; see `DecodeGraphs.missing`."""
        return None if self._graphs is None else self._graphs.missing(sequences)

    def _recorded(self, sequences: Sequence[SequenceStep]) -> DecodeGraphs | None:
        """Return the graphs among which this step is, recorded now if need be; None if it is not."""
        if self._graphs is None:
            return None
        while (missing := self._graphs.missing(sequences)) is not None:
            self._graphs.record_or_drop(missing)
        return self._graphs if self._graphs.accepts(sequences) else None

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        draws: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """See `LaunchingBackend.launch`: what was captured can be launched."""
        with self._current(), torch.no_grad():
            graphs = self._recorded(sequences)
            return None if graphs is None else graphs.launch(sequences, draws, abort)

    def samples_on_device(self, row: SampleRow) -> bool:
        """See `LaunchingBackend.samples_on_device`."""
        return True

    def plan_decode(
        self,
        max_batch: int,
        block_size: int,
        capture: GraphCapture | None = None,
        *,
        windows: WindowGroups | None = None,
    ) -> int:
        """See `GraphBackend.plan_decode`. `capture` is that of the device unless given."""
        with self._current(), torch.no_grad():
            self._graphs = None
            self._graphs = DecodeGraphs(
                self._layers,
                max_batch,
                block_size,
                capture,
                windows=windows,
                gives_hidden=self._gives_hidden,
            )
            return self._graphs.count

    def prepare_decode(self, memory: KVMemory) -> None:
        """See `GraphBackend.prepare_decode`."""
        for recording in self.use_decode(memory):
            with self._current(), torch.no_grad():
                self._planned_graphs.record_or_drop(recording)

    def use_decode(self, memory: KVMemory) -> Sequence[DecodeRecording]:
        """Let decode steps be recorded over `memory`; return those that `prepare_decode` records."""
        self._planned_graphs.use(memory)
        return self._planned_graphs.planned

    def record_decode(self, recording: DecodeRecording) -> None:
        """Record one decode step. Raises CaptureFailed."""
        with self._current(), torch.no_grad():
            self._planned_graphs.record(recording)

    def drop_decode(self, recording: DecodeRecording, why: str) -> None:
        """See `DecodeGraphs.drop`."""
        self._planned_graphs.drop(recording, why)

    @property
    def _planned_graphs(self) -> DecodeGraphs:
        if self._graphs is None:
            raise RuntimeError("decode steps were not planned")
        return self._graphs

    def record_prompts(
        self,
        layout: KVLayout,
        most_tokens: int,
        capture: GraphCapture | None = None,
        *,
        seconds: float = RECORDING_S,
    ) -> int:
        """See `PromptGraphBackend.record_prompts`, after whose `seconds` no recording begins.

        `capture` is that of the device unless given.
        """
        self.plan_prompts(layout, most_tokens, capture)
        if self._prompts is None:
            return 0
        with self._current(), torch.no_grad():
            self._prompts.record(seconds)
            return self._prompts.count

    def plan_prompts(self, layout: KVLayout, most_tokens: int, capture: GraphCapture | None = None) -> int:
        """Take the buffers of recorded prompt steps, as `record_prompts` does; return how many of them
        `record_prompt` may record, one by one.
        """
        with self._current(), torch.no_grad():
            self._prompts = None
            if not most_tokens or layout.latent:
                return 0
            self._prompts = PromptGraphs(self._layers, layout, most_tokens, capture)
            return len(self._prompts.planned)

    def record_prompt(self, number: int) -> None:
        """Record one of the planned prompt steps. Raises RuntimeError where it cannot be recorded."""
        assert self._prompts is not None, "prompt steps were planned"
        with self._current(), torch.no_grad():
            self._prompts.record_one(number)

    def drop_prompt(self, number: int, why: str) -> None:
        """See `PromptGraphs.drop`."""
        assert self._prompts is not None, "prompt steps were planned"
        self._prompts.drop(number, why)

    # ---- a recorded prompt step ----------------------------------------------------------------------

    def _replay_prompts(
        self, launched: PromptStep, draws: Sequence[SampleRow | None], abort: AbortWords | None
    ) -> StepOutput:
        """Compute logits and tokens behind a step that was launched; it is done then."""
        rows = launched.hidden[launched.logit_rows]
        logits = self._layers.logits(rows)
        self._lose_aborted(logits, launched.logit_owners, abort)
        collect = launch_sampling(self._layers, logits, draws)
        if launched.watch is not None:
            launched.watch()
        elif self._device.type == "cuda":
            wait_for_stream(len(launched.hidden))
        if launched.states is not None:
            launched.states.log_lost()
        output = collect()
        return replace(output, hidden=rows.float().cpu()) if self._gives_hidden else output

    @staticmethod
    def _lose_aborted(logits: torch.Tensor, owners: Sequence[int], abort: AbortWords | None) -> None:
        """Make NaN of the rows of logits whose sequences, `owners`, were aborted."""
        if abort is not None and abort.words.any():
            logits[[row for row, owner in enumerate(owners) if abort.is_aborted(owner)]] = torch.nan

    # ---- one step, eagerly ---------------------------------------------------------------------------

    def _compute(
        self, sequences: Sequence[SequenceStep], abort: AbortWords | None
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return logits on the device, in the batch's order, and hidden rows on the host, if they are wanted;
        None when all were aborted. The step is done then.
        """
        placed = pack_step(sequences, abort, self._device)
        step = placed.step
        if step.adapters is not None and self._layers.adapters is not None:
            step = replace(step, adapter_scratch=self._layers.adapters.scratch(step.num_tokens))
        self._layers.rotary.reach(max(step.start + len(step.token_ids) for step in sequences))
        hidden = self._layers.hidden(
            step,
            self._activations(placed.step.num_tokens),
            self._scratch_for(placed, sequences[0].memory.layout.block_size),
            self._wanted(placed, abort),
            given_embeddings(sequences, [span.start for span in placed.spans]),
        )
        found = None
        if hidden is not None:
            rows = hidden[placed.logit_rows]
            logits = self._layers.logits(rows)
            self._lose_aborted(logits, placed.logit_owners, abort)
            found = logits, rows.float().cpu() if self._gives_hidden else None
        if self._device.type == "cuda":
            wait_for_stream(step.num_tokens)
        if step.states is not None and found is not None:
            step.states.log_lost()
        return found

    def _wanted(self, placed: PlacedStep, abort: AbortWords | None) -> Callable[[], bool]:
        """Return the check before each layer, which stops sequences whose abort words were set meanwhile."""
        known: set[int] = set()
        pace = LaunchThrottle(self._device, placed.step.num_tokens)

        def wanted() -> bool:
            if abort is None and not self._layers.paced:
                return True
            pace.wait()
            if abort is None:
                return True
            if abort.all_aborted():
                return False
            for sequence in np.flatnonzero(abort.words).tolist():
                if sequence not in known:
                    known.add(sequence)
                    placed.abort_row(sequence)
            return True

        return wanted

    # ---- memory --------------------------------------------------------------------------------------

    def _activations(self, tokens: int) -> Any:
        """Return buffers for so many tokens; the largest step so far decides how many there are."""
        if self._buffers is None or self._buffers.capacity < tokens:
            self._buffers = None  # first: both together may not fit
            self._buffers = self._layers.buffers(tokens)
        return self._buffers.rows(tokens)

    def _scratch_for(self, placed: PlacedStep, block_size: int) -> Any:
        """Return the buffers of decode rows' partial sums; None where there are no decode rows."""
        # Tables of layers with a window are no wider than that of all tokens.
        decodes = [group.decodes for group in placed.step.tables[0].groups if group.decodes is not None]
        if not decodes:
            return None
        rows = max(len(found.lengths) for found in decodes)
        tokens = block_size * max(found.tables.shape[1] for found in decodes)
        if rows > self._scratch_size[0] or tokens > self._scratch_size[1]:
            self._scratch_size = max(rows, self._scratch_size[0]), max(tokens, self._scratch_size[1])
            shape = self._shape
            self._scratch = self._layers.operators.make_scratch(
                self._scratch_size[0], shape.num_heads, shape.head_dim, self._scratch_size[1], self._device
            )
        return self._scratch

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        return current(self._device)
