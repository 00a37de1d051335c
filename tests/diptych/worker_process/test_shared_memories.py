"""Answers of ranks to rank 0, each of which is read by the order that asked for it."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout
from diptych.worker_process.group import shared_memories
from diptych.worker_process.group.orders import RankFailed
from diptych.worker_process.group.rank_memory import RankMemory
from diptych.worker_process.group.shared_memories import SharedMemories

LAYOUT = KVLayout(1, 1, 8, 16, torch.float32)
OWN, RANKS = RankMemory(1, 2), 2


def answer(control: Connection[Any, Any], rank: int) -> None:
    """Answer each question with the number of blocks that it names, or fail where it names none."""
    while (order := control.recv()) is not None:
        control.send(RankMemory(rank, order.num_blocks) if order.num_blocks else RankFailed("no blocks"))


@pytest.fixture
def memories() -> Any:
    """Two ranks as threads behind pipes."""
    pipes = [Pipe() for _ in range(RANKS)]
    threads = [
        threading.Thread(target=answer, args=(theirs, rank)) for rank, (_, theirs) in enumerate(pipes, 1)
    ]
    for thread in threads:
        thread.start()
    yield SharedMemories([(0, ours) for ours, _ in pipes])
    for ours, _ in pipes:
        ours.send(None)
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("error", [RuntimeError, OSError])
@pytest.mark.parametrize("blocks", [5, 0])
def test_an_error_of_rank_0_leaves_no_answer_for_the_next_question(
    memories: SharedMemories, error: type[Exception], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no blocks the ranks fail as well: rank 0's own error is raised."""

    def fail(*_: object) -> RankMemory:
        raise error("the card is lost")

    with monkeypatch.context() as patched:
        patched.setattr(shared_memories, "measure_rank", fail)
        with pytest.raises(Exception, match="the card is lost"):
            memories.measure(LAYOUT, blocks, 0)
    monkeypatch.setattr(shared_memories, "measure_rank", lambda *_: OWN)
    assert memories.measure(LAYOUT, 9, 0) == [OWN, RankMemory(1, 9), RankMemory(2, 9)]
