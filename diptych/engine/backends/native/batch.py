"""A batch as the native step takes it: numbers in arrays, and what these must not outlive."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.backends.native.status import NativeError
from diptych.engine.batch import AbortWords, SequenceStep
from kernels.cpu import library as native


@dataclass(frozen=True)
class Taps:
    """Layers whose inputs a step keeps, and the numbers of each."""

    layers: array[int]
    hidden_size: int


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Rows of images: what the residual stream begins with for their tokens, and what it takes behind the
    first layers, one row behind each (Qwen3-VL).
    """

    layers: int
    places: array[int]
    """Row of each token of the step, or -1."""
    rows: torch.Tensor
    """Float32 `[rows, (1 + layers) * hidden]`: first the embedding, then those of the layers."""

    @classmethod
    def of(
        cls, given: tuple[torch.Tensor, torch.Tensor], tokens: int, hidden_size: int, dtype: torch.dtype
    ) -> ImageRows:
        """Return them of what `given_embeddings` found in a step of so many tokens; embeddings are rounded as
        those of the model, of type `dtype`.
        """
        places, rows = given
        of_tokens = array("i", [-1]) * tokens
        for row, place in enumerate(places.tolist()):
            of_tokens[place] = row
        exact = rows.float()
        entering = exact[:, :hidden_size].to(dtype).float()
        exact = torch.cat([entering, exact[:, hidden_size:]], dim=1)
        return cls(rows.shape[1] // hidden_size - 1, of_tokens, exact)

    @property
    def behind(self) -> int:
        """Address of the first row's numbers behind the first layer."""
        hidden_size = self.rows.shape[1] // (1 + self.layers)
        return self.rows.data_ptr() + hidden_size * self.rows.itemsize


class GivenRows(NamedTuple):
    """Changes that tokens with embeddings of their own make to a step.

    Args:
        ends: the first positions that tokens do not see; None: those after their own.
        images: the rows of these tokens that this process takes.
        enter: whether their embeddings begin the stream here; a later stage has them in the rows that enter.
    """

    ends: Sequence[int] | None = None
    images: ImageRows | None = None
    enter: bool = True


@dataclass(frozen=True, eq=False)
class Passing:
    """Residual streams of a step's tokens, float32 `[tokens, hidden]`, between stages of a pipeline."""

    enters: torch.Tensor | None
    """Output of the stage before; None for the first one."""
    leaves: torch.Tensor | None
    """Memory for the input of the next one; None for the last one."""


@dataclass(eq=False)
class NativeBatch:
    """A batch as the native side takes it, with all that it points into."""

    native: native.Batch
    alive: Sequence[object]
    likeliest: array[int]
    """Memory for the tokens of rows that are sampled."""
    follows: int | None
    """Address of the rows that its sequences follow, if one does."""
    hidden: torch.Tensor | None
    """Memory for the rows behind the final norm, if they are wanted."""
    features: torch.Tensor | None
    """Memory for the residual stream before tapped layers, if any are."""
    stale: array[int]
    """Memory for a number a sequence: 1 once it has found other recurrent states than those before it."""


def native_batch(
    sequences: Sequence[SequenceStep],
    greedy: bytes,
    abort: AbortWords | None,
    dtype: torch.dtype,
    turns: npt.NDArray[np.int64] | None = None,
    given: GivenRows = GivenRows(),  # noqa: B008  # it is immutable
    hidden_size: int | None = None,
    taps: Taps | None = None,
    view_offset: int = 0,
    passing: Passing | None = None,
) -> NativeBatch:
    """Lay out a batch for the native step; `greedy` has a byte a row of logits, and `turns` for each token
    the row of the rotary tables, by default its position.

    `dtype` is that of keys and values. A byte is 1 where the row's likeliest token is wanted and not the
    logits. With `hidden_size` there is memory for hidden rows of so many numbers, with `taps` for the inputs
    of layers. Keys and values begin `view_offset` bytes within each block; `passing` rows enter and leave the
    layers of a stage.

    Raises NativeError for memories that are not of the model's layout.
    """
    layout = sequences[0].memory.layout
    tokens, tables = array("i"), array("i")
    memories = list({id(step.memory): step.memory for step in sequences}.values())
    # The native side knows one block size and one element size; a memory of another layout would be addressed
    # wrongly.
    if layout.dtype != dtype or any(memory.layout != layout for memory in memories):
        raise NativeError("all memories of a batch must have the model's layout")
    for step in sequences:
        tokens.extend(step.token_ids)
        tables.extend(step.block_table)
    arrays = {
        "tokens": tokens,
        "tables": tables,
        "counts": array("i", [len(step.token_ids) for step in sequences]),
        "starts": array("i", [step.start for step in sequences]),
        "table_lengths": array("i", [len(step.block_table) for step in sequences]),
        "memories": array("Q", [step.memory.address + view_offset for step in sequences]),
        "memory_blocks": array("i", [step.memory.num_blocks for step in sequences]),
        "logit_rows": array("i", [step.logit_rows for step in sequences]),
        "greedy": array("B", greedy),
    }
    windowed = _add_windows(arrays, sequences)
    stale = array("B", bytes(len(sequences)))
    follows = array("i", [-1 if step.follows is None else step.follows for step in sequences])
    if any(step.adapter is not None for step in sequences):
        arrays["adapters"] = array("i", [-1 if step.adapter is None else step.adapter for step in sequences])
    if turns is not None:
        arrays["turns"] = array("i", turns.tolist())
    if given.ends is not None:
        arrays["ends"] = array("i", given.ends)
    if any(step.settled is not None for step in sequences):
        arrays["settled"] = array("i", [step.kept_tokens for step in sequences])
    images = given.images
    if images is not None:
        arrays["image_places"] = images.places
    if any(step.parents is not None for step in sequences):
        arrays["parents"] = array("i", [parent for step in sequences for parent in _parents(step)])
    hidden = None if hidden_size is None else torch.zeros((len(greedy), hidden_size))
    features = None if taps is None else torch.zeros((len(tokens), len(taps.layers) * taps.hidden_size))
    batch = native.Batch(
        sequences=len(sequences),
        block_size=layout.block_size,
        block_stride=sequences[0].memory.stride_bytes // layout.dtype.itemsize,
        kept=native.KV_INT8 if layout.has_scales else native.KV_OWN,
        windowed=windowed,
        page_block_bytes=0 if layout.states is None else layout.states.block_bytes,
        stale=stale.buffer_info()[0],
        taps=0 if taps is None else len(taps.layers),
        tapped=None if taps is None else taps.layers.buffer_info()[0],
        features=None if features is None else features.data_ptr(),
        hidden=None if hidden is None or not len(hidden) else hidden.data_ptr(),
        enters=None if passing is None or passing.enters is None else passing.enters.data_ptr(),
        leaves=None if passing is None or passing.leaves is None else passing.leaves.data_ptr(),
        image_layers=0 if images is None else images.layers,
        image_rows=0 if images is None else len(images.rows),
        image_stride=0 if images is None else images.rows.shape[1],
        images=None if images is None else images.behind,
        embeddings=None if images is None or not given.enter else images.rows.data_ptr(),
        abort_words=None if abort is None else abort.words.ctypes.data,
        **{name: values.buffer_info()[0] for name, values in arrays.items()},
    )
    alive = [*arrays.values(), follows, abort, memories, taps, passing, given]
    some = any(step.follows is not None for step in sequences)
    address = follows.buffer_info()[0] if some else None
    return NativeBatch(batch, alive, array("i", [-1]) * len(greedy), address, hidden, features, stale)


def _add_windows(arrays: dict[str, array[int]], sequences: Sequence[SequenceStep]) -> int:
    """Add the tables of layers with a window to `arrays`, where these lie in blocks of their own; return how
    many a sequence has.
    """
    windows = sequences[0].memory.layout.windows
    if windows is None:
        return 0
    tables = array("i")
    for step in sequences:
        for table in step.window_tables:
            tables.extend(table)
    arrays["window_tables"] = tables
    arrays["layer_places"] = array("i", [number for place in windows.places for number in place])
    arrays["window_firsts"] = array("i", [step.window_first for step in sequences])
    arrays["window_lengths"] = array("i", [len(step.window_tables[0]) for step in sequences])
    return windows.tables


def _parents(step: SequenceStep) -> Sequence[int]:
    return range(-1, len(step.token_ids) - 1) if step.parents is None else step.parents


def positions_of(sequences: Sequence[SequenceStep]) -> int:
    """Return how many positions a batch reaches, at most what its blocks hold: anything beyond is refused
    later.
    """
    return max(
        min(step.start + len(step.token_ids), len(step.block_table) * step.memory.layout.block_size)
        for step in sequences
    )
