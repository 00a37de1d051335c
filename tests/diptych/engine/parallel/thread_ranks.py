"""Ranks as threads of this process: the exchange of a group without its processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.kv_shares import KVShare
from diptych.engine.parallel.parts import Part, deal_parts, parts_of_rank
from diptych.engine.parallel.stages import Grid, Stage, deal_stages
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel.ways import links_of, own_ways, ways_of
from diptych.engine.weights.part_weights import read_parts, weight_bytes
from diptych.engine.weights.reader import OpenCheckpoint

Found = TypeVar("Found")
BLOCK = 16
BY_TORCH = partial(PartsBackend, threads=1)
"""Maker of the torch backend of a rank."""


class Meeting:
    """Tensors that the threads of a group leave for one another."""

    def __init__(self, ranks: int) -> None:
        self.left: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)


class ThreadCommunicator:
    """End of a group that one thread holds."""

    def __init__(self, meeting: Meeting, rank: int, on_device: bool = False) -> None:
        self._meeting, self.on_device = meeting, on_device
        self.rank, self.ranks = rank, len(meeting.left)

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        self._meeting.left[self.rank] = own.clone()  # as others may read it while its owner goes on
        self._meeting.barrier.wait()
        everything = torch.stack(self._meeting.left)
        self._meeting.barrier.wait()
        return everything

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        everything = self.all_gather(own)
        return everything if self.rank == 0 else None

    def all_to_all(
        self, own: Sequence[torch.Tensor], rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        self._meeting.left[self.rank] = [one.clone() for one in own]
        self._meeting.barrier.wait()
        came = [of_rank[self.rank] for of_rank in self._meeting.left]
        self._meeting.barrier.wait()
        assert rows is None or [len(one) for one in came] == list(rows)
        return came


class ThreadGroup:
    """The backends of a group's ranks; each step is computed by all."""

    def __init__(
        self,
        opened: OpenCheckpoint,
        parts: int,
        ranks: int,
        *,
        stages: int = 1,
        whole_experts: bool = False,
        all_to_all: bool = False,
        dealt: Sequence[Part] | None = None,
        dealt_stages: Sequence[Stage] | None = None,
        held: Sequence[KVShare | None] | None = None,
        make: Callable[..., Any] = BY_TORCH,
        on_device: bool = False,
    ) -> None:
        """Deal a model; `dealt` and `dealt_stages` are others than those that weights are read for, for
        controls. `held` are the shares of blocks in memories of each rank's own, `make` makes a backend, and
        `on_device` is what communicators say of themselves.
        """
        self.shape: ModelShape = opened.shape
        self.right = deal_parts(opened.shape, parts, whole_experts=whole_experts, all_to_all=all_to_all)
        self.parts = self.right if dealt is None else tuple(dealt)
        right_stages = deal_stages(opened.shape, stages)
        used_stages = right_stages if dealt_stages is None else dealt_stages
        grid, self.stop_word = Grid(ranks, stages), StopWord()
        meetings = {way: Meeting(len(way.members)) for way in ways_of(grid)}
        self.backends = []
        self.weight_bytes = []
        for number in range(grid.size):
            ends = [
                (way, ThreadCommunicator(meetings[way], way.members.index(number), on_device))
                for way in own_ways(number, grid)
            ]
            stage, rank = grid.place(number)
            own = [self.right[one] for one in parts_of_rank(parts, rank, ranks)]
            weights = read_parts(opened, own, right_stages[stage])
            self.weight_bytes.append(weight_bytes(weights))
            backend = make(
                opened.shape,
                self.parts,
                weights,
                links_of(number, ends),
                used_stages[stage],
                stop_word=self.stop_word,
                held=None if held is None else held[number],
            )
            self.backends.append(backend)

    def memory(self, blocks: int = 8) -> KVMemory:
        """Return blocks with all heads."""
        return memory_of(self.shape, blocks)

    def step(
        self, memories: KVMemory | Sequence[KVMemory], start: int, tokens: Sequence[int], trailing: int = 1
    ) -> torch.Tensor:
        """Compute a chunk in one memory, or each rank in its own; return rank 0's logits."""
        chosen = [memories] * len(self.backends) if isinstance(memories, KVMemory) else memories
        return self._forward([[SequenceStep(one, range(8), start, tokens, True, trailing)] for one in chosen])

    def forward(self, sequences: Sequence[SequenceStep], abort: None = None) -> torch.Tensor:
        """Compute a step of all ranks; return its logits."""
        return self._forward([sequences] * len(self.backends))

    def forward_planned(
        self, sequences: Sequence[SequenceStep], planned: Sequence[SequenceStep]
    ) -> torch.Tensor:
        """Compute a step whose other ranks have it as `planned`; return its logits."""
        return self._forward([sequences, *[planned] * (len(self.backends) - 1)])

    def on_all(self, do: Callable[[Any], object]) -> None:
        """Do something with the backend of every rank, of all at once."""
        with ThreadPoolExecutor(len(self.backends)) as threads:
            list(threads.map(do, self.backends))  # errors of all ranks are raised

    def lead_and_follow(self, lead: Callable[[], Found], follow: Callable[[Any], None]) -> Found:
        """Let rank 0 lead while each other rank follows with its backend; return what rank 0 found."""
        with ThreadPoolExecutor(len(self.backends)) as threads:
            others = [threads.submit(follow, backend) for backend in self.backends[1:]]
            found = threads.submit(lead).result(60)
            for other in others:
                other.result(60)
        return found

    def _forward(self, of_ranks: Sequence[Sequence[SequenceStep]]) -> torch.Tensor:
        self.stop_word.reset()
        with ThreadPoolExecutor(len(self.backends)) as threads:
            logits = threads.map(lambda backend, steps: backend.forward(steps, None), self.backends, of_ranks)
            return list(logits)[0]  # noqa: RUF015  # errors of all ranks are raised

    def decode(
        self, memory: KVMemory | Sequence[KVMemory], text: Sequence[int], tokens: int
    ) -> tuple[list[int], torch.Tensor]:
        """Go on greedily, see `go_on`."""
        return go_on(self, memory, text, tokens)


Memories = TypeVar("Memories", contravariant=True)


class Steps(Protocol[Memories]):
    """Computation of chunks in memories."""

    def step(self, memory: Memories, start: int, tokens: Sequence[int], trailing: int = 1, /) -> torch.Tensor:
        """Compute a chunk; return the logits after its last `trailing` tokens."""
        ...


class Ranks(Protocol):
    """Ranks of one model."""

    def memory(self) -> KVMemory:
        """Return blocks with all heads of the model."""
        ...

    def step(self, memory: KVMemory, start: int, tokens: Sequence[int], trailing: int = 1, /) -> torch.Tensor:
        """Compute a chunk; return the logits after its last `trailing` tokens."""
        ...


def go_on(
    ranks: Steps[Memories], memory: Memories, text: Sequence[int], tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Go on greedily after a text whose last token is not computed; return tokens and all logits."""
    found, logits, last = [], [], text[-1]
    for at in range(len(text) - 1, len(text) - 1 + tokens):
        logits.append(ranks.step(memory, at, [last])[-1])
        last = int(logits[-1].argmax())
        found.append(last)
    return found, torch.stack(logits)


def memory_of(shape: ModelShape, blocks: int = 8, dtype: torch.dtype = torch.float32) -> KVMemory:
    """Return blocks with all heads of a model."""
    latent = shape.latent is not None
    width = shape.kept_numbers if latent else shape.head_dim
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, width, BLOCK, dtype, latent=latent)
    return KVMemory(layout, blocks)


def whole(opened: OpenCheckpoint, text: Sequence[int]) -> torch.Tensor:
    """Return the logits of a text by the backend that knows no parts."""
    backend = TorchBackend(opened.shape, opened.read_all().weights)
    return backend.forward([SequenceStep(memory_of(opened.shape), range(8), 0, text, True, len(text))], None)
