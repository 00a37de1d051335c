"""The reference backend: the decoder in torch over a batch of sequences in paged blocks, slow on purpose."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.backends.lacks import lacks_adapters, lacks_trees
from diptych.engine.backends.torch.adapters import TorchAdapters
from diptych.engine.backends.torch.decoder import Decoder
from diptych.engine.backends.torch.hidden_rows import HiddenRows
from diptych.engine.backends.torch.recurrent.step_states import StepStates
from diptych.engine.backends.torch.row_groups import attention_of, group_tables
from diptych.engine.batch import AbortWords, SequenceStep, StepOutput, given_embeddings, rotary_positions
from diptych.engine.models.shape import ModelShape
from diptych.engine.state_cuts import LOST_ROWS
from diptych.engine.weights import Weights

_LOG = logging.getLogger(__name__)


class TorchBackend:
    """Executes steps with the torch meaning of every operator."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        kv_scales: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepare the decoder on `device`, where keys and values will be; with `kv_scales`
        (kernels/fp8_cache.py) these are kept in FP8.
        """
        self._device = torch.device(device)
        weights = on_device(weights, self._device)
        self._decoder = Decoder(shape, weights)
        self._adapters = TorchAdapters(self._device)
        self._shape = shape
        scales = None if kv_scales is None else kv_scales.to(self._device)
        self._attention = attention_of(shape, [layer.sinks for layer in weights.layers], scales)

    def twin(self) -> TorchBackend:
        """See `TwinBackend.twin`."""
        made = copy.copy(self)
        made._adapters = TorchAdapters(self._device)
        return made

    def set_threads(self, threads: int) -> None:
        """Use `threads` cores in this process' torch calls from the calling thread."""
        torch.set_num_threads(threads)

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`."""
        return lacks_adapters(self._shape)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `AdapterBackend.prepare_adapter`: it is read as it is."""
        return adapter

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `AdapterBackend.set_adapter`."""
        assert prepared is None or isinstance(prepared, Adapter)
        self._adapters.set(slot, prepared)

    def give_hidden_rows(self) -> HiddenRows:
        """See `HiddenRowsBackend.give_hidden_rows`."""
        return HiddenRows(self)

    @property
    def embedding(self) -> torch.Tensor:
        """See `EmbeddingBackend.embedding`."""
        return self._decoder.embedding

    def give_features(self, layers: Sequence[int]) -> HiddenRows:
        """See `FeatureBackend.give_features`."""
        return HiddenRows(self, layers)

    def lacks_trees(self) -> str | None:
        """See `TreeBackend.lacks_trees`."""
        return lacks_trees(self._shape)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`; rows of aborted sequences are NaN, and of those that found other recurrent
        states than those before them.
        """
        return self.forward_with_features(sequences, abort, None).logits

    def forward_with_features(
        self, sequences: Sequence[SequenceStep], abort: AbortWords | None, taps: Sequence[int] | None
    ) -> StepOutput:
        """See `WithFeatures.forward_with_features`."""
        kept = dict.fromkeys(taps or (), torch.empty(0))
        with torch.inference_mode():
            tokens, positions, last = (numbers.to(self._device) for numbers in flatten(sequences))
            tables = group_tables(sequences)
            windows = sequences[0].memory.layout.windows
            states = StepStates(sequences) if self._shape.recurrent_layers else None
            recur = None if states is None else states.advance

            def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                table, slot = (0, layer) if windows is None else windows.places[layer]
                return self._attention.attend(tables[table], layer, q, k, v, slot)

            def wanted() -> bool:
                if abort is None:
                    return True
                if abort.all_aborted():
                    return False
                if abort.words.any():
                    tables[:] = group_tables(sequences, abort)
                return True

            given = given_embeddings(sequences)
            adapters = self._adapters.of_step(sequences)
            normed = self._decoder.forward(
                tokens, positions, last, attend, wanted, adapters, given, kept, recur
            )
            logits = None if normed is None else self._decoder.logits(normed)
            stale = [] if states is None or logits is None else states.finish(abort)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # a handoff of the step's blocks knows no device
            if logits is None or normed is None:
                return StepOutput.logits_only(torch.full((len(last), self._shape.vocab_size), torch.nan))
            logits = logits.cpu()
            if abort is not None or stale:
                owners = [i for i, step in enumerate(sequences) for _ in range(step.logit_rows)]
                aborted = [abort is not None and abort.is_aborted(i) for i in range(len(sequences))]
                logits[[aborted[i] or i in stale for i in owners]] = torch.nan
            if stale:
                _LOG.error(LOST_ROWS, stale)
            if taps is None:
                return StepOutput.logits_only(logits)
            features = torch.cat([kept[tap] for tap in taps], dim=-1).float().cpu() if taps else None
            return StepOutput([None] * len(logits), logits, normed.float().cpu(), features)


def on_device(record: Any, device: torch.device) -> Any:
    """Return a record of weights with all tensors, also those of records in it, on `device`."""
    if isinstance(record, torch.Tensor):
        return record.to(device)
    if isinstance(record, tuple):
        return type(record)(on_device(one, device) for one in record)
    if isinstance(record, dict):
        return {name: on_device(one, device) for name, one in record.items()}
    if is_dataclass(record) and not isinstance(record, type):
        return replace(record, **{name: on_device(value, device) for name, value in vars(record).items()})
    return record


def flatten(sequences: Sequence[SequenceStep]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and positions of all sequences in a row, and the indices of the tokens after which logits are
    wanted.
    """
    tokens: list[int] = []
    last: list[int] = []
    for step in sequences:
        tokens.extend(step.token_ids)
        last.extend(range(len(tokens) - step.logit_rows, len(tokens)))
    positions = torch.from_numpy(rotary_positions(sequences))
    return torch.tensor(tokens), positions, torch.tensor(last, dtype=torch.int64)
