"""Recorded steps of a group on the Triton step: rank 0's backend and the other ranks' loop, over pipes.

Ranks are threads, and a recording is the work done anew. Processes are in tests/end_to_end and tests/gpu.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from diptych.engine.backends.triton.prompt_graphs import PromptGraphs
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.step_plan import StepPlan
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from diptych.worker_process.group import triton_group_backend
from diptych.worker_process.group.orders import AdapterOrder, AdapterQuestion, Recording
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_steps import carry_out
from diptych.worker_process.group.triton_group_backend import TritonGroupBackend
from tests.diptych.engine.backends.triton.test_parts_backend import TritonRanks
from tests.diptych.engine.models.family_models import config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup, go_on

TOKENS, MEMORY = 6, 7
GREEDILY = SampleRow(SamplingParams(temperature=0.0), (), ())


pytestmark = pytest.mark.usefixtures("one_thread")


class Memories:
    """The memory of a test, under its number, and the questions that rank 1 answers."""

    def __init__(self, memory: KVMemory, adapters: RankAdapters) -> None:
        self.mapped = {MEMORY: memory}
        self._adapters = adapters

    def ask(self, order: AdapterQuestion) -> str | None:
        failed = self._adapters.answer(order)
        return None if failed is None else f"rank 1: {failed.why}"

    def layout_of_ranks(self, layout: KVLayout) -> KVLayout:
        return layout

    def number_of(self, memory: KVMemory) -> int:
        assert memory is self.mapped[MEMORY]
        return MEMORY


class Group:
    """Rank 1 as a thread behind a pipe, as rank 0 sees it; `answers` counts its words."""

    def __init__(self, ranks: ThreadGroup, memory: KVMemory) -> None:
        self.adapters = RankAdapters(ranks.backends[1])
        self.memories, self.stop_word, self.answers = Memories(memory, self.adapters), ranks.stop_word, 0
        self._plans, theirs = Pipe()
        self._thread = threading.Thread(target=self._follow, args=(ranks.backends[1], theirs))
        self._thread.start()

    def _follow(self, backend: Any, plans: Connection[Any, Any]) -> None:
        while (order := plans.recv()) is not None:
            carry_out(order, backend, cast(Any, self.memories), self.adapters, plans)

    def begin_step(self, plan: StepPlan | Recording) -> None:
        self._plans.send(plan)

    def send_order(self, order: AdapterOrder) -> None:
        self._plans.send(order)

    def end_step(self) -> None:
        self._plans.recv_bytes()
        self.answers += 1

    def end_recording(self) -> str | None:
        self.answers += 1
        why = self._plans.recv_bytes().decode()
        return f"rank 1: {why}" if why else None

    def fail(self, error: BaseException) -> NoReturn:
        raise error

    def end(self) -> None:
        self._plans.send(None)
        self._thread.join(60)


@pytest.fixture
def opened(tmp_path: Path) -> OpenCheckpoint:
    return open_checkpoint(save(oracle_of(config_of("smollm3")), tmp_path), "fp32")


@pytest.fixture
def ranks(opened: OpenCheckpoint) -> ThreadGroup:
    return TritonRanks(opened, 2, 2, on_device=True)


@pytest.fixture
def group(ranks: ThreadGroup) -> Iterator[Group]:
    made = Group(ranks, ranks.memory())
    yield made
    made.end()


def test_launched_steps_follow_one_another_without_a_word_of_the_ranks(
    opened: OpenCheckpoint, ranks: ThreadGroup, group: Group
) -> None:
    text, memory = text_of(20), group.memories.mapped[MEMORY]
    backend = TritonGroupBackend(ranks.backends[0], cast(Any, group))
    assert backend.plan_decode(2, memory.layout.block_size) > 0
    backend.prepare_decode(memory)
    backend.forward([SequenceStep(memory, range(8), 0, text[:-1], False)], None)
    assert group.answers == 5, "buffers, a memory, two recordings, and a step that is not recorded"

    def launch(number: int) -> Any:
        token, follows = (text[-1], None) if number == 0 else (0, 0)
        step = SequenceStep(memory, range(8), len(text) - 1 + number, [token], True, 1, follows)
        return backend.launch([step], [GREEDILY], None)

    found, waiting = [], launch(0)
    for number in range(1, TOKENS):
        following = launch(number)
        found += waiting.collect().tokens
        waiting = following
    found += waiting.collect().tokens
    assert group.answers == 5
    assert [token.token_id for token in found if isinstance(token, Sampled)] == expected_text(opened, text)


@pytest.mark.parametrize(("seconds", "made"), [(60.0, 4), (-1.0, 0), (2.5, 2)])
def test_all_ranks_record_the_prompt_steps_that_rank_0_has_time_for(
    ranks: ThreadGroup, group: Group, seconds: float, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of rank 0 is a second later at every look; that of other ranks is not asked.

    What a recording holds is tested with the kernels, which alone find blocks by their distance.
    """
    clock = itertools.count()
    looking = threading.current_thread()

    def monotonic() -> float:
        assert threading.current_thread() is looking
        return float(next(clock))

    monkeypatch.setattr(triton_group_backend, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(PromptGraphs, "_record", lambda self, tokens, sequences: (tokens, sequences))
    layout = group.memories.mapped[MEMORY].layout
    backend = TritonGroupBackend(ranks.backends[0], cast(Any, group), recording_s=seconds)
    assert backend.record_prompts(layout, 32) == made
    recorded = [list(rank._step._prompts._recorded) for rank in ranks.backends]
    assert recorded[0] == recorded[1] == [(32, 1), (16, 1), (32, 8), (16, 8)][:made]


def expected_text(opened: OpenCheckpoint, text: list[int]) -> list[int]:
    """Return the tokens of one process that computes both parts, step by step."""
    alone = TritonRanks(opened, 2, 1)
    memory = alone.memory()
    alone.step(memory, 0, text[:-1])
    return go_on(alone, memory, text, TOKENS)[0]
