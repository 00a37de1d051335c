"""A draft model beside a group whose ranks have memories of their own, all on the Triton step.

Rank 0 computes the draft model whole, over the segment behind its share of each block; steps that check its
drafts are recorded. Ranks are threads, and a recording is the work done anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_shares import KVShare, kv_shares
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.parallel.stages import Grid, deal_stages
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.worker_process.group.orders import AllocateShare
from diptych.worker_process.group.shared_memories import SharedMemories
from diptych.worker_process.group.triton_group_backend import TritonGroupBackend
from kvtransfer.transports.base import CPU
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.backends.triton.test_parts_backend import TritonRanks
from tests.diptych.engine.models.family_models import config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.thread_ranks import go_on, memory_of
from tests.diptych.worker_process.test_triton_group import MEMORY, TOKENS, Group

DRAFTED, BLOCKS, LONGEST = 3, 8, 32
pytestmark = pytest.mark.usefixtures("one_thread")


class OwnMemories:
    """Memories of two ranks: rank 0's, with a draft model's segment, and rank 1's."""

    def __init__(self, first: KVMemory, second: KVMemory) -> None:
        self.mapped, self._first = {MEMORY: second}, first

    def number_of(self, memory: KVMemory) -> int:
        assert memory is self._first
        return MEMORY

    def layout_of_ranks(self, layout: KVLayout) -> KVLayout:
        return layout.without_draft()


class Drafting:
    """Two ranks of a model that drafts for itself in rank 0."""

    def __init__(self, folder: Path) -> None:
        save(oracle_of(config_of("smollm3")), folder)
        opened = open_checkpoint(folder, "fp32")
        self.shape, self.opened = opened.shape, opened
        shares = kv_shares(deal_parts(self.shape, 2), deal_stages(self.shape, 1), Grid(2))
        own = memory_of(self.shape, 1).layout
        self.layout = replace(own, draft=own)
        ranks = TritonRanks(opened, 2, 2, on_device=True, held=shares)
        first, second = shares
        made = KVMemory(first.narrow(self.layout), BLOCKS)
        self.memory = made.as_share_of(self.layout, first.layers.start, first.heads.start)
        assert self.memory.draft is not None
        self.drafts = self.memory.draft
        theirs = KVMemory(second.narrow(own), BLOCKS)
        self.group = Group(ranks, memory_of(self.shape, 1))
        self.group.memories = cast(Any, OwnMemories(self.memory, theirs))
        self.backend = TritonGroupBackend(ranks.backends[0], cast(Any, self.group))
        self.recorded = ranks.backends[0]._step
        self.drafter = TritonBackend(self.shape, opened.read_all().weights, "cpu", REFERENCE_OPERATORS)

    def record(self) -> None:
        self.backend.record_prompts(self.layout, LONGEST)
        self.backend.plan_decode(2, self.layout.block_size)
        self.backend.prepare_decode(self.memory)

    def generate(
        self, text: list[int], count: int, lost: Callable[[torch.Tensor], object]
    ) -> tuple[list[int], int, int]:
        """Return greedy tokens, how many were drafted and accepted; each step checks a draft.

        `lost` gets the draft model's keys and values once the prompt is computed.
        """
        known, drafted, accepted, computed = list(text), 0, 0, len(text) - 1
        self.backend.forward([self._step(self.memory, 0, known[:-1], 1)], None)
        self.drafter.forward([self._step(self.drafts, 0, known[:-1], 1)], None)
        lost(self.drafts.data)
        while len(known) < len(text) + count:
            draft: list[int] = []
            while len(draft) < DRAFTED:
                every = [*known, *draft]
                step = self._step(self.drafts, computed, every[computed:], 1)
                draft.append(int(self.drafter.forward([step], None)[-1].argmax()))
                computed = len(every)
            step = self._step(self.memory, len(known) - 1, [known[-1], *draft], 1 + DRAFTED)
            assert self.recorded._prompts is not None
            assert self.recorded._prompts.accepts([step]), "what checks drafts is recorded"
            said = self.backend.forward([step], None).argmax(dim=1).tolist()
            right = next((at for at in range(DRAFTED) if said[at] != draft[at]), DRAFTED)
            computed = len(known)
            known += said[: right + 1]
            drafted, accepted = drafted + DRAFTED, accepted + right
        return known[len(text) :][:count], drafted, accepted

    def _step(self, memory: KVMemory, start: int, tokens: list[int], trailing: int) -> SequenceStep:
        return SequenceStep(memory, range(BLOCKS), start, tokens, True, trailing)


@pytest.mark.parametrize("lost", [False, True])
def test_recorded_steps_check_what_rank_0_drafts(lost: bool, tmp_path: Path) -> None:
    """The control: a segment whose numbers are lost costs drafts, and no token."""
    text, made = text_of(20), Drafting(tmp_path)
    alone = TritonRanks(made.opened, 2, 1)
    kept = alone.memory()
    alone.step(kept, 0, text[:-1])
    expected = go_on(alone, kept, text, 3 * TOKENS)[0]
    made.record()
    tokens, drafted, accepted = made.generate(text, 3 * TOKENS, torch.Tensor.zero_ if lost else len)
    made.group.end()
    assert tokens == expected
    assert (drafted == accepted) == (not lost)


def test_other_ranks_have_no_room_for_a_draft_models_segment() -> None:
    own = KVLayout(2, 2, 8, 4, torch.float32)
    both, held = replace(own, draft=own), KVShare(range(2), range(1))
    memories, (ours, theirs) = SharedMemories([]), Pipe()
    memories.add_holders([ours], lambda memory, number: cast(Any, None), held, CPU)
    theirs.send(None)  # the rank's answer
    made = memories.allocate(both, 3)
    assert theirs.recv() == AllocateShare(0, own, 3)
    assert made.layout == both
    assert made.draft is not None
    assert made.data.shape == (3, *held.narrow(own).block_shape)
    assert made.draft.data.shape == (3, *own.block_shape)
    assert memories.layout_of_ranks(both) == own
    made.data.fill_(1.0)
    assert not made.draft.data.any(), "the segments lie apart"
