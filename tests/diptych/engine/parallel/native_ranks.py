"""Ranks of the native step as threads of this process: the exchange of a group without its processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from diptych.engine.backends.native.parts_backend import NativePartsBackend
from diptych.engine.backends.native.rotations import on_grids
from diptych.engine.backends.native.share import Share
from diptych.engine.batch import AbortWords, Launched, SequenceStep, StepOutput
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.parts import deal_parts, parts_of_rank
from diptych.engine.parallel.stages import Grid, deal_stages
from diptych.engine.parallel.ways import links_of, own_ways, ways_of
from diptych.engine.sampling import SampleRow, SamplingParams
from diptych.engine.weights.part_weights import read_parts, weight_bytes
from diptych.engine.weights.reader import OpenCheckpoint
from tests.diptych.engine.parallel.thread_ranks import Meeting, ThreadCommunicator, go_on, memory_of


class NativeGroup:
    """The backends of a group's ranks. Rank 0's calls wait; the others compute on threads of their own."""

    def __init__(
        self,
        opened: OpenCheckpoint,
        parts: int,
        ranks: int,
        dtype: torch.dtype = torch.float32,
        *,
        threads: int = 1,
        stages: int = 1,
        whole_experts: bool = False,
        kind: type[Share] = Share,
    ) -> None:
        """Deal a model; `kind` is another share than the product's, for controls."""
        self.shape, self.dtype = opened.shape, dtype
        self.parts = deal_parts(opened.shape, parts, whole_experts=whole_experts)
        dealt, grid = deal_stages(opened.shape, stages), Grid(ranks, stages)
        meetings = {way: Meeting(len(way.members)) for way in ways_of(grid) if way.kind != "ranks"}
        files = [os.memfd_create("sums") for _ in dealt]
        self.backends, self.weight_bytes = [], []
        for number in range(grid.size):
            place, rank = grid.place(number)
            ways = [way for way in own_ways(number, grid) if way in meetings]
            ends = [(way, ThreadCommunicator(meetings[way], way.members.index(number))) for way in ways]
            own = [self.parts[one] for one in parts_of_rank(parts, rank, ranks)]
            weights = read_parts(opened, own, dealt[place])
            share = kind(opened.shape, own, weights, rank, ranks, dealt[place], files[place])
            self.weight_bytes.append(weight_bytes(weights))
            links = links_of(number, ends)
            self.backends.append(NativePartsBackend(share, dtype, links, threads=threads))
        for file in files:
            os.close(file)
        self._threads = ThreadPoolExecutor(grid.size)
        self._followed: list[Future[None]] = []

    def memory(self, blocks: int = 8) -> KVMemory:
        """Return blocks with all heads."""
        return memory_of(self.shape, blocks, self.dtype)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None = None) -> torch.Tensor:
        """Compute a step of all ranks; return its logits."""
        self.follow(sequences, bytes(sum(step.logit_rows for step in sequences)))
        logits = self.backends[0].forward(sequences, abort)
        self.wait()
        return logits

    def forward_planned(
        self, sequences: Sequence[SequenceStep], planned: Sequence[SequenceStep]
    ) -> torch.Tensor:
        """Compute a step whose other ranks have it as `planned`; return its logits."""
        self.follow(planned, bytes(sum(step.logit_rows for step in sequences)))
        logits = self.backends[0].forward(sequences, None)
        self.wait()
        return logits

    def wait(self) -> None:
        """Wait for the other stages of a pipeline."""
        for followed in self._followed:
            followed.result()
        self._followed.clear()

    def sample(self, sequences: Sequence[SequenceStep], rows: Sequence[SampleRow | None]) -> StepOutput:
        """Compute a step and sample what the backend samples."""
        self.follow(sequences, _greedy(rows))
        return self.backends[0].forward_and_sample(sequences, rows, None)

    def launch(self, sequences: Sequence[SequenceStep], rows: Sequence[SampleRow]) -> Launched:
        """Begin a step of all ranks."""
        self.follow(sequences, _greedy(rows))
        launched = self.backends[0].launch(sequences, rows, None)
        assert launched is not None
        return launched

    def follow(self, sequences: Sequence[SequenceStep], greedy: bytes) -> None:
        for backend in self.backends[1:]:
            launches = backend.samples_on_device(SampleRow(SamplingParams(temperature=0.0), (), ()))
            if launches and not on_grids(sequences):
                backend.follow(sequences, greedy)
            else:  # it waits for other stages, or for the step's end
                self._followed.append(self._threads.submit(backend.follow, sequences, greedy))

    def step(self, memory: KVMemory, start: int, tokens: Sequence[int], trailing: int = 1) -> torch.Tensor:
        """Compute a chunk; return the logits after its last `trailing` tokens."""
        return self.forward([SequenceStep(memory, range(8), start, tokens, True, trailing)])

    def decode(self, memory: KVMemory, text: Sequence[int], tokens: int) -> tuple[list[int], torch.Tensor]:
        """Go on greedily, see `go_on`."""
        return go_on(self, memory, text, tokens)


def _greedy(rows: Sequence[SampleRow | None]) -> bytes:
    return bytes([row is not None and row.params.greedy for row in rows])
