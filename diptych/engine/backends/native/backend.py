"""The step as one native call: the C++ of kernels/cpu over the same blocks as the torch backend."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.backends.lacks import lacks_adapters, lacks_trees
from diptych.engine.backends.native.adapters import NativeAdapter, whole_products
from diptych.engine.backends.native.batch import (
    GivenRows,
    ImageRows,
    NativeBatch,
    Passing,
    Taps,
    native_batch,
    positions_of,
)
from diptych.engine.backends.native.every_row import compute_every_row, has_every_row
from diptych.engine.backends.native.packing import native_shape, pack_model, stored
from diptych.engine.backends.native.rotations import Rotations, Turns, on_grids, turns_of
from diptych.engine.backends.native.share import Share
from diptych.engine.backends.native.share_adapters import share_products
from diptych.engine.backends.native.shared_weights import EmptyFile, MappedWeights
from diptych.engine.backends.native.status import NativeError, check
from diptych.engine.backends.native.supports import supports
from diptych.engine.batch import (
    AbortWords,
    Launched,
    SequenceStep,
    StepOutput,
    given_embeddings,
    visible_ends,
)
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.stage_images import rows_of_stage
from diptych.engine.sampling import Sampled, SampleFailure, SampleRow
from diptych.engine.sampling.sample import NOT_FINITE
from diptych.engine.state_cuts import LOST_ROWS
from diptych.engine.weights import Storage, Weights
from kernels import int8_cache
from kernels.cpu import library as native

_LOG = logging.getLogger(__name__)
_DTYPES = {torch.float32: native.FP32, torch.bfloat16: native.BF16}
_QUANTISED: dict[Storage, int] = {"blocks": native.BLOCKS, "bytes": native.BYTES}


class NativeUnavailable(RuntimeError):
    """A model that cannot be computed natively in this installation; the message says why."""


class NativeBackend:
    """Executes steps of one model in C++, on as many threads as it is told.

    Batch-invariant: a sequence's keys, values and logits have the same bits whatever its neighbours in the
    batch, the chunks its prompt came in, and the number of threads.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights | MappedWeights | Share,
        dtype: torch.dtype,
        instruction_set: str | None = None,
        *,
        kept: torch.dtype | None = None,
        packed: EmptyFile | None = None,
    ) -> None:
        """Pack `weights` (diptych/engine/weights), which may be freed afterwards; or take packed ones, or a
        rank's share of the model, whose steps all ranks must compute in one order.

        With `packed` they are packed into that file, which another process' backend of the same shape, dtype
        and instruction set takes; its content is whole when this returns.

        `dtype` is that of embedding, keys and values, and of the matrices that are not quantised (which come
        with bfloat16); `kept` is that of keys and values where they are kept in int8.

        `instruction_set` is one of `native.instruction_sets`, None the best. Raises NativeUnavailable.
        """
        if (why := supports(shape)) is not None:
            raise NativeUnavailable(f"the native step does not compute {why}")
        if dtype not in _DTYPES or (weights.storage in _QUANTISED and dtype != torch.bfloat16):
            raise NativeUnavailable(f"dtype {dtype} is not computed natively")
        if kept not in (None, dtype, int8_cache.DTYPE):
            raise NativeUnavailable(f"keys and values in {kept} are not computed natively")
        try:
            self._library = native.load()
        except native.LibraryMissing as error:
            raise NativeUnavailable(str(error)) from error
        self._check = partial(check, self._library)
        self._shape = shape
        self._dtype = dtype
        self._kept = dtype if kept is None else kept
        self._threads = 1
        self._guests_from = 0
        name = None if instruction_set is None else instruction_set.encode()
        number = _QUANTISED.get(weights.storage, _DTYPES[dtype])
        self._share = weights if isinstance(weights, Share) else None
        if self._share is None:
            self._model: int = self._library.diptych_model_new(native_shape(shape, number), name)
        else:
            self._model = self._share.open(self._library, number, name)
        if not self._model:
            raise NativeUnavailable(native.last_error(self._library))
        self.completions, told = os.pipe()
        for end in (self.completions, told):
            os.set_blocking(end, False)
        weakref.finalize(self, _free, self._library, self._model, (self.completions, told))
        self._library.diptych_tell(self._model, told)
        self._embedding: torch.Tensor | None = None
        if isinstance(weights, MappedWeights):
            self._check(self._library.diptych_map_weights(self._model, weights.file))
        elif isinstance(weights, Share):
            self._embedding = weights.pack(self._library, self._model, dtype)
        else:
            self._pack(weights, packed)
        self._rotations = Rotations(self._library, self._model, shape)
        self._adapters: dict[int, NativeAdapter] = {}
        self._ahead: deque[_LaunchedStep] = deque()
        self._hidden_size: int | None = None  # of the rows that outputs have
        self._taps: Taps | None = None
        self._every_row = False
        self._no_logits = torch.empty((0, shape.vocab_size))

    def _pack(self, weights: Weights, packed: EmptyFile | None) -> None:
        if packed is not None:
            self._check(self._library.diptych_share_weights(self._model, packed.file, packed.most_bytes))
        pack_model(self._library, self._model, self._shape, weights, self._dtype)
        embedding = stored(weights.embed, self._dtype)
        self._check(self._library.diptych_set_embedding(self._model, embedding.data_ptr()))
        tied = self._library.diptych_embed_from_head(self._model)
        if packed is not None:
            self._check(self._library.diptych_close_weights(self._model))
        elif not tied:
            self._embedding = embedding  # read at every step, never copied

    @property
    def mixes_chunks(self) -> bool:
        """See `MixedStepBackend`: weights are read once for all rows of a step."""
        return True

    @property
    def embeds_from_head(self) -> bool:
        """True where the embedding is read out of the packed head, whose numbers it has."""
        return bool(self._library.diptych_embed_from_head(self._model))

    def embedding_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the embedding of tokens before it is scaled, float32 `[tokens, hidden]`."""
        ids = torch.tensor(token_ids, dtype=torch.int32)
        rows = torch.empty(len(ids), self._shape.hidden_size)
        self._check(
            self._library.diptych_embedding_rows(self._model, ids.data_ptr(), len(ids), rows.data_ptr())
        )
        return rows

    def set_threads(self, threads: int) -> None:
        """Use `threads` cores from the next step on."""
        self._threads = threads

    def use_idle_cores(self, states: int, cores: Sequence[int]) -> None:
        """See `CoreLendingBackend.use_idle_cores`. `states` must stay valid as long as this backend lives."""
        numbers = (ctypes.c_int32 * len(cores))(*cores)
        self._check(self._library.diptych_set_guests(self._model, states, numbers, len(cores)))

    def use_idle_cores_after(self, after: float) -> None:
        """See `CoreLendingBackend.use_idle_cores_after`."""
        self._guests_from = math.ceil(after * self._shape.num_layers)

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`."""
        return lacks_adapters(self._shape)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `AdapterBackend.prepare_adapter`: steps read it where it is packed here."""
        if self._share is None:
            products = whole_products(self._shape, adapter)
        else:
            products = share_products(self._share, adapter)
        return NativeAdapter(self._library, self._model, products, self._dtype)

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `AdapterBackend.set_adapter`."""
        assert prepared is None or isinstance(prepared, NativeAdapter)
        address = None if prepared is None else prepared.address
        self._check(self._library.diptych_set_adapter(self._model, slot, address))
        if prepared is None:
            self._adapters.pop(slot, None)
        else:
            self._adapters[slot] = prepared

    def give_hidden_rows(self) -> NativeBackend:
        """See `HiddenRowsBackend.give_hidden_rows`: from the next step on."""
        self._hidden_size = self._shape.hidden_size
        return self

    @property
    def embedding(self) -> torch.Tensor:
        """See `EmbeddingBackend.embedding`: a copy where the packed weights hold it."""
        if self._embedding is not None:
            return self._embedding
        return self.embedding_rows(range(self._shape.vocab_size)).to(self._dtype)

    def give_features(self, layers: Sequence[int]) -> NativeBackend:
        """See `FeatureBackend.give_features`: from the next step on. Raises ValueError for the stream behind
        the final norm beside that before layers.
        """
        self._every_row = self._shape.num_layers in layers
        if self._every_row and len(layers) > 1:
            raise ValueError(f"features {list(layers)}: the last one is given by itself")
        if self._every_row:
            return self.give_hidden_rows()
        self.tap(layers)
        return self

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the residual stream before these layers, of a share its own, from the next step on."""
        self._taps = Taps(array("i", layers), self._shape.hidden_size) if layers else None

    def lacks_trees(self) -> str | None:
        """See `TreeBackend.lacks_trees`. A token of a tree has the bits that it has in a chain."""
        return lacks_trees(self._shape)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`; rows of aborted sequences are NaN. One call at a time.

        Raises NativeError, with nothing written, for a batch that would leave its memory.
        """
        rows = sum(step.logit_rows for step in sequences)
        return self.forward_stage(sequences, bytes(rows), abort)[0]

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        draws: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """See `SamplingBackend.forward_and_sample`: greedy rows are drawn as their logits come."""
        if self._every_row and not has_every_row(sequences):
            return compute_every_row(
                sequences, draws, lambda wide, rows: self.forward_and_sample(wide, rows, abort)
            )
        greedy = bytes([draw is not None and draw.params.greedy for draw in draws])
        logits, batch = self.forward_stage(sequences, greedy, abort)
        pairs = zip(batch.likeliest, greedy, strict=True)
        tokens = [_to_sampled(token) if drew else None for token, drew in pairs]
        return StepOutput(tokens, logits, batch.hidden, self._features(batch))

    def samples_on_device(self, row: SampleRow) -> bool:
        """See `LaunchingBackend.samples_on_device`: the likeliest token, and no other."""
        return row.params.greedy

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        draws: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """See `LaunchingBackend.launch`: batches of which every row is sampled, within the tables."""
        if not self.launches(sequences, draws):
            return None
        return self._launch(sequences, b"\x01" * len(draws), abort, turns_of(sequences))

    def launches(self, sequences: Sequence[SequenceStep], draws: Sequence[SampleRow | None]) -> bool:
        """Return whether `launch` begins this step."""
        if not all(draw is not None and self.samples_on_device(draw) for draw in draws):
            return False
        if on_grids(sequences):
            return False  # it is computed with tables of its own
        if self._every_row and not has_every_row(sequences):
            return False
        if self._shape.recurrent_layers:
            return False  # a token behind the last one of an answer would be in its states
        # Tables take their time to make, and a running step reads those that there are.
        return positions_of(sequences) <= self.positions

    @property
    def positions(self) -> int:
        """Positions that rotary tables reach now."""
        return self._rotations.positions

    def follow(self, sequences: Sequence[SequenceStep], greedy: bytes) -> Launched | None:
        """Begin a step whose logits, of the rows that are not `greedy`, another rank of the group has.

        No other step may be launched where tables do not reach its positions, or where these lie on grids:
        such a step is over at the return, and None.
        """
        with self._rotations.of_step(sequences, alone=not self._ahead) as turns:
            launched = self._launch(sequences, greedy, None, turns)
            if not on_grids(sequences):
                return launched
            launched.collect()
            return None

    def forward_stage(
        self,
        sequences: Sequence[SequenceStep],
        greedy: bytes,
        abort: AbortWords | None,
        passing: Passing | None = None,
    ) -> tuple[torch.Tensor, NativeBatch]:
        """Compute the layers that are here, those of a stage or all; return the logits of rows that are not
        `greedy`, which those of the last stage have, and the batch with what else came of it.

        `passing` are the rows between this stage and others. Raises NativeError.
        """
        with self._rotations.of_step(sequences, alone=not self._ahead) as turns:
            return self._run(self._batch(sequences, greedy, abort, turns, passing), greedy)

    def _launch(
        self,
        sequences: Sequence[SequenceStep],
        greedy: bytes,
        abort: AbortWords | None,
        turns: Turns | None,
    ) -> Launched:
        batch = self._batch(sequences, greedy, abort, turns)
        step = _LaunchedStep(self._is_over, self._collect, batch)
        step.number = self._library.diptych_launch(
            self._model,
            batch.native,
            batch.follows,
            self._threads,
            self._guests_from,
            batch.likeliest.buffer_info()[0],
        )
        if not step.number:
            raise NativeError(native.last_error(self._library))
        self._ahead.append(step)
        return step

    def _is_over(self, step: _LaunchedStep) -> bool:
        return bool(self._library.diptych_is_over(self._model, step.number))

    def _collect(self, step: _LaunchedStep) -> StepOutput:
        if not self._ahead or self._ahead[0] is not step:
            raise RuntimeError("steps are collected once and in the order of their launches")
        status = self._library.diptych_collect(self._model, step.number)
        self._ahead.popleft()
        if status != native.ALL_ABORTED:
            self._check(status)
        tokens = [_to_sampled(token) for token in step.batch.likeliest]
        return StepOutput(tokens, self._no_logits, step.batch.hidden, self._features(step.batch))

    def _features(self, batch: NativeBatch) -> torch.Tensor | None:
        """Return the features of a step that has the rows for them."""
        return batch.hidden if self._every_row else batch.features

    def _batch(
        self,
        sequences: Sequence[SequenceStep],
        greedy: bytes,
        abort: AbortWords | None,
        turns: Turns | None,
        passing: Passing | None = None,
    ) -> NativeBatch:
        return native_batch(
            sequences,
            greedy,
            abort,
            self._kept,
            turns,
            self._given_rows(sequences),
            hidden_size=self._hidden_size,
            taps=self._taps,
            passing=passing,
            view_offset=0 if self._share is None else self._share.view_offset(sequences[0].memory.layout),
        )

    def _given_rows(self, sequences: Sequence[SequenceStep]) -> GivenRows:
        """Return what tokens with embeddings of their own change in a step of this model or share."""
        stage, hidden = None if self._share is None else self._share.stage, self._shape.hidden_size
        given = given_embeddings(sequences) if stage is None else rows_of_stage(sequences, stage, hidden)
        ends = _ends(sequences)
        if given is None:
            return GivenRows(ends)
        tokens = sum(len(step.token_ids) for step in sequences)
        images = ImageRows.of(given, tokens, hidden, self._dtype)
        return GivenRows(ends, images, enter=stage is None or stage.is_first)

    def _run(self, batch: NativeBatch, greedy: bytes) -> tuple[torch.Tensor, NativeBatch]:
        logits = torch.empty((greedy.count(0), self._shape.vocab_size))
        status = self._library.diptych_step(
            self._model,
            batch.native,
            self._threads,
            self._guests_from,
            logits.data_ptr(),
            batch.likeliest.buffer_info()[0],
        )
        if any(batch.stale):
            found = [number for number, one in enumerate(batch.stale) if one]
            _LOG.error(LOST_ROWS, found)
        if status == native.ALL_ABORTED:
            return logits.fill_(torch.nan), batch
        self._check(status)
        return logits, batch


def _ends(sequences: Sequence[SequenceStep]) -> Sequence[int] | None:
    """Return the first positions that a batch's tokens do not see, where these are not those after theirs."""
    if not any(one.whole for step in sequences for one in step.embeddings):
        return None
    plain = (range(step.start + 1, step.start + 1 + len(step.token_ids)) for step in sequences)
    found = ((visible_ends(step), other) for step, other in zip(sequences, plain, strict=True))
    return [end for own, other in found for end in (other if own is None else own.tolist())]


def _free(library: ctypes.CDLL, model: int, descriptors: Sequence[int]) -> None:
    library.diptych_model_free(model)  # ends after the steps that were launched, which write to the last one
    for descriptor in descriptors:
        os.close(descriptor)


def _to_sampled(token: int) -> Sampled | SampleFailure:
    return NOT_FINITE if token < 0 else Sampled(token)


class _LaunchedStep:
    """A step on its way; see `diptych.engine.batch.Launched`. It must live until it is computed."""

    def __init__(
        self,
        is_over: Callable[[_LaunchedStep], bool],
        collect: Callable[[_LaunchedStep], StepOutput],
        batch: NativeBatch,
    ) -> None:
        self.batch = batch
        self.number = 0
        self._is_over, self._collect = is_over, collect

    def done(self) -> bool:
        return self._is_over(self)

    def collect(self) -> StepOutput:
        return self._collect(self)
