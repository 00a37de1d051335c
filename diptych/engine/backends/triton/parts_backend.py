"""The Triton backend of one rank of a group, or of one process that computes all parts by itself.

It is the backend of a whole model (backend.py) over the layers of the rank's parts (parts_layers.py): steps
are packed, launched and recorded alike. Every rank is given the same steps in one order. Rank 0 samples; in a
recorded step the others get its tokens within the graph, so that a step can follow one that is not over.

    exchange           recorded steps   a step whose sequences are all aborted
    on the device      yes              ends before the same layer on every rank, three layers later; one of
                                        less than 256 tokens, or recorded, is computed to its end
    through the host   no               ends before the same layer on every rank, the next one
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.adapters.part_adapter import part_adapters
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.cuda_graph import GraphCapture
from diptych.engine.backends.triton.current_device import current, numbered
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_weights import pack
from diptych.engine.backends.triton.parts_experts import with_one_shared_expert
from diptych.engine.backends.triton.parts_layers import PartsLayers
from diptych.engine.backends.triton.prefill_attention import chosen_operators
from diptych.engine.backends.triton.prompt_graphs import RECORDING_S
from diptych.engine.batch import AbortWords, DecodeRecording, Launched, SequenceStep, StepOutput
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.kv_shares import KVShare
from diptych.engine.parallel.parts import Part, parts_of_rank
from diptych.engine.parallel.pipeline import Links
from diptych.engine.parallel.stages import Stage
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.sampling import SampleRow, SamplingParams
from diptych.engine.weights import Weights

_ELSEWHERE = SampleRow(SamplingParams(temperature=0.0), (), ())
"""Sampling of a row on a rank that samples nothing."""
_MOST_LAUNCHED = 2
"""Steps that a rank computes or is about to; see `LaunchingBackend.launch`."""


class TritonPartsBackend:
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
        device: torch.device | str,
        operators: Operators | None = None,
        kv_scales: torch.Tensor | None = None,
        held: KVShare | None = None,
    ) -> None:
        """Pack the weights that the parts of `links.ranks.rank` have in the layers of `stage` onto `device`.

        `kv_scales`, float32 `[layers, 2, kv_heads]` of the whole model, say that the KV cache is in FP8.
        Memories hold whole blocks, or the share `held` of each. `operators` are the Triton kernels unless
        given. Raises TritonUnavailable, or UnsupportedModel for weights that they do not multiply.
        """
        where = numbered(device)
        self._links, self._held = links, held
        own = [parts[number] for number in parts_of_rank(len(parts), links.ranks.rank, links.ranks.ranks)]
        self._cut_adapter = partial(part_adapters, shape=shape, parts=own, layers=stage.layers)
        self._stop_word = stop_word
        with current(where), torch.no_grad():
            scales = None if kv_scales is None else kv_scales.to(where)
            chosen = operators or chosen_operators(shape, where, fp8_cache=scales is not None)
            packed = [pack(one, where) for one in weights]
            if parts[0].sends_rows:
                packed = with_one_shared_expert(packed)
            layers = PartsLayers(
                shape,
                parts,
                packed,
                chosen,
                links,
                stage,
                self._stop_word,
                kv_scales=scales,
                held=held,
            )
        self._layers, self._step = layers, TritonBackend.over(layers)
        self._followed: deque[Launched] = deque()

    @property
    def device(self) -> torch.device:
        """Device of weights, keys and values."""
        return self._step.device

    @property
    def weight_bytes(self) -> int:
        """See `WeighedBackend.weight_bytes`, of this rank's parts."""
        return self._layers.read_bytes

    @property
    def expert_bytes(self) -> int:
        """See `WeighedBackend.expert_bytes`, of this rank's parts."""
        return self._layers.expert_bytes

    def set_threads(self, threads: int) -> None:
        """Ignore `threads`: the host only launches."""

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`; every rank is called."""
        return self._step.allow_adapters(slots, max_rank)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `AdapterBackend.prepare_adapter`: returns what each own part has of it."""
        return self._cut_adapter(adapter)

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `AdapterBackend.set_adapter`; every rank is called, between the same steps."""
        self._step.set_adapter(slot, prepared)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`. Rank 0 alone has an `abort`, and returns logits; the others return no rows.

        A sequence that is aborted may be written to the end of the step by other ranks.
        """
        rows = sum(step.logit_rows for step in sequences)
        return self.forward_and_sample(sequences, [None] * rows, abort).logits

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """See `SamplingBackend.forward_and_sample`."""
        if self._links.is_alone:
            self._stop_word.reset()
        return self._step.forward_and_sample(sequences, rows, abort)

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """See `LaunchingBackend.launch`: what was recorded can be launched."""
        return self._step.launch(sequences, rows, abort)

    def launches(self, sequences: Sequence[SequenceStep]) -> bool:
        """Return whether a step was recorded, the same on every rank: it ends without a word between them."""
        return self._step.launches(sequences)

    def follow(
        self, sequences: Sequence[SequenceStep], greedy: bytes = b"", taps: Sequence[int] | None = None
    ) -> bool:
        """Compute this rank's share of a step of rank 0's, after those that came before; `taps` are None.

        A recorded step is launched, once the one before the last is over; another is over at the return, and
        only then is True returned: rank 0 waits for a word of it. Raises GroupBroken.
        """
        rows = sum(step.logit_rows for step in sequences)
        if not self._step.launches(sequences):
            self._collect(leave=0)
            self._step.forward_and_sample(sequences, [None] * (rows if self._links.leads else 0), None)
            return True
        self._collect(leave=_MOST_LAUNCHED - 1)
        launched = self._step.launch(sequences, [_ELSEWHERE] * rows, None)
        assert launched is not None
        self._followed.append(launched)
        return False

    def _collect(self, leave: int) -> None:
        while len(self._followed) > leave:
            self._followed.popleft().collect()

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
        """See `GraphBackend.plan_decode`; every rank is called. 0 where exchanges cannot be recorded."""
        if not self._links.on_device:
            return 0
        return self._step.plan_decode(max_batch, block_size, capture, windows=windows)

    def prepare_decode(self, memory: KVMemory) -> None:
        """See `GraphBackend.prepare_decode`, in a process that computes alone or where no capture fails.

        The ranks of a group record by `use_decode` and `record_decode`: those with other recordings would not
        meet.
        """
        if self._links.on_device:
            self._step.prepare_decode(memory)

    def use_decode(self, memory: KVMemory) -> Sequence[DecodeRecording]:
        """See `TritonBackend.use_decode`; every rank is called. None where exchanges cannot be recorded."""
        return self._step.use_decode(memory) if self._links.on_device else ()

    def missing(self, sequences: Sequence[SequenceStep]) -> DecodeRecording | None:
        """See `TritonBackend.missing`: the same on every rank."""
        return self._step.missing(sequences)

    def record_decode(self, recording: DecodeRecording) -> None:
        """See `TritonBackend.record_decode`; every rank is called, and all drop it where one raises."""
        self._collect(leave=_MOST_LAUNCHED - 1)
        self._step.record_decode(recording)

    def drop_decode(self, recording: DecodeRecording, why: str) -> None:
        """See `DecodeGraphs.drop`; every rank is called."""
        self._step.drop_decode(recording, why)

    def record_prompts(
        self,
        layout: KVLayout,
        most_tokens: int,
        capture: GraphCapture | None = None,
        *,
        seconds: float = RECORDING_S,
    ) -> int:
        """See `TritonBackend.record_prompts`, in a process that computes alone.

        The ranks of a group record by `plan_prompts` and `record_prompt`: those with other recordings would
        not meet.
        """
        if not self._links.is_alone:
            raise RuntimeError("ranks of a group record prompt steps one by one, all the same ones")
        return self._step.record_prompts(layout, most_tokens, capture, seconds=seconds)

    def plan_prompts(self, layout: KVLayout, most_tokens: int, capture: GraphCapture | None = None) -> int:
        """Take the buffers of recorded prompt steps of up to `most_tokens` tokens; return how many may be
        recorded, 0 where exchanges cannot be. Every rank is called, with the `layout` of whole blocks.
        """
        if not self._links.on_device:
            return 0
        if self._held is not None:
            layout = self._held.narrow(layout)
        return self._step.plan_prompts(layout, most_tokens, capture)

    def record_prompt(self, number: int) -> None:
        """Record one of the planned prompt steps; every rank is called, and all drop it where one raises
        CaptureFailed.
        """
        self._step.record_prompt(number)

    def drop_prompt(self, number: int, why: str) -> None:
        """See `PromptGraphs.drop`; every rank is called."""
        self._step.drop_prompt(number, why)
