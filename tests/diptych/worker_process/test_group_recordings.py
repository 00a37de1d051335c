"""Recordings that one rank of a group cannot make: all ranks drop them, and the text stays.

Ranks are threads, and a recording is the work done anew. Its failure comes after the work, as that of a CUDA
graph comes after the runs that warm up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backends.triton.cuda_graph import CaptureFailed
from diptych.engine.backends.triton.prompt_graphs import PromptGraphs
from diptych.engine.batch import SequenceStep
from diptych.engine.sampling import Sampled
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from diptych.worker_process.group.rank_group import RankGroup
from diptych.worker_process.group.triton_group_backend import TritonGroupBackend
from tests.adapters import merged, write_adapter
from tests.diptych.engine.backends.triton.test_decode_graphs import FailingCapture
from tests.diptych.engine.backends.triton.test_parts_adapters import greedy_of
from tests.diptych.engine.backends.triton.test_parts_backend import TritonRanks
from tests.diptych.engine.models.family_models import config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup
from tests.diptych.worker_process.test_triton_group import GREEDILY, MEMORY, Group, expected_text

TOKENS, RANK, TEXT = 6, 8, text_of(20)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle() -> Any:
    return oracle_of(config_of("smollm3"))


@pytest.fixture(scope="module")
def opened(oracle: Any, folder: Path) -> OpenCheckpoint:
    return open_checkpoint(save(oracle, folder / "model"), "fp32")


@pytest.fixture
def ranks(opened: OpenCheckpoint) -> ThreadGroup:
    return TritonRanks(opened, 2, 2, on_device=True)


@pytest.fixture
def group(ranks: ThreadGroup) -> Iterator[Group]:
    made = Group(ranks, ranks.memory())
    yield made
    made.end()


def prepared(ranks: ThreadGroup, group: Group, rank: int, capture: FailingCapture) -> TritonGroupBackend:
    """Return rank 0's backend. Decode steps of two rows and one are recorded, on `rank` by `capture`."""
    memory = group.memories.mapped[MEMORY]
    backend = TritonGroupBackend(ranks.backends[0], cast(Any, group))
    assert backend.plan_decode(2, memory.layout.block_size) == 2
    ranks.backends[rank]._step._graphs._capture = capture
    backend.prepare_decode(memory)
    return backend


def go_on(backend: TritonGroupBackend, group: Group, count: int, slot: int | None = None) -> list[int]:
    """Return the tokens after the text, each by a launched step or, where none is, by an eager one."""
    memory, found = group.memories.mapped[MEMORY], [TEXT[-1]]
    backend.forward([SequenceStep(memory, range(8), 0, TEXT[:-1], False, adapter=slot)], None)
    for at in range(len(TEXT) - 1, len(TEXT) - 1 + count):
        steps = [SequenceStep(memory, range(8), at, found[-1:], True, 1, None, slot)]
        launched = backend.launch(steps, [GREEDILY], None)
        output = (
            backend.forward_and_sample(steps, [GREEDILY], None) if launched is None else launched.collect()
        )
        assert isinstance(output.tokens[0], Sampled)
        found.append(output.tokens[0].token_id)
    return found[1:]


def recorded(ranks: ThreadGroup) -> list[list[tuple[int, bool]]]:
    return [sorted(rank._step._graphs._graphs) for rank in ranks.backends]


@pytest.mark.parametrize(
    ("rank", "failing", "left"), [(0, (0,), [1]), (1, (1,), [2]), (1, (0, 1), [])], ids=str
)
def test_a_decode_recording_that_fails_on_a_rank_is_dropped_by_all(
    opened: OpenCheckpoint,
    ranks: ThreadGroup,
    group: Group,
    rank: int,
    failing: tuple[int, ...],
    left: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step of one row is computed by the recording of two, or with none left eagerly."""
    with caplog.at_level(logging.WARNING):
        backend = prepared(ranks, group, rank, FailingCapture(failing))
    assert f"rank {rank}: the pool of the graphs is full" in caplog.text
    answers = group.answers
    assert go_on(backend, group, TOKENS) == expected_text(opened, TEXT)
    assert group.answers - answers == 1 + (0 if left else TOKENS), "eager steps are answered"
    assert recorded(ranks) == [[(rows, False) for rows in left]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_decode_step_with_adapters_is_eager_where_a_rank_cannot_record_it(
    oracle: Any, opened: OpenCheckpoint, folder: Path, ranks: ThreadGroup, group: Group, rank: int
) -> None:
    """Fail recordings 2 and 3 of a rank, which are made among steps, when the first such one comes."""
    adapter = write_adapter(folder / f"adapter-{rank}", oracle, seed=1)
    backend = prepared(ranks, group, rank, FailingCapture((2, 3)))
    assert backend.allow_adapters(1, RANK) is None
    backend.set_adapter(0, backend.prepare_adapter(read_adapter(adapter, opened.shape, RANK)))
    assert go_on(backend, group, TOKENS, slot=0) == greedy_of(merged(oracle, adapter), TEXT, TOKENS)
    assert recorded(ranks) == [[(1, False), (2, False)]] * 2
    assert go_on(backend, group, TOKENS) == expected_text(opened, TEXT)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prompt_recording_that_fails_on_a_rank_is_the_last_of_all(
    ranks: ThreadGroup, group: Group, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record nothing here: only kernels find blocks by their distance, and are tested with recordings."""

    def record(self: PromptGraphs, tokens: int, sequences: int) -> tuple[int, int]:
        if self is ranks.backends[rank]._step._prompts and (tokens, sequences) == (32, 8):
            raise CaptureFailed("the pool of the graphs is full")
        return tokens, sequences

    monkeypatch.setattr(PromptGraphs, "_record", record)
    backend = TritonGroupBackend(ranks.backends[0], cast(Any, group), recording_s=600.0)
    assert backend.record_prompts(group.memories.mapped[MEMORY].layout, 32) == 2
    backend.plan_decode(1, 16)  # answered: all before it is done
    assert [list(one._step._prompts._recorded) for one in ranks.backends] == [[(32, 1), (16, 1)]] * 2


def test_an_error_in_the_work_itself_ends_the_group(ranks: ThreadGroup, group: Group) -> None:
    """The control: the ranks may be out of step then, as after that of any step."""
    with pytest.raises(ValueError, match="the pool of the graphs is full"):
        prepared(ranks, group, 0, FailingCapture((0,), ValueError))


def test_answers_name_the_first_rank_that_failed() -> None:
    pipes = [Pipe() for _ in range(3)]
    group: Any = SimpleNamespace(_others=[SimpleNamespace(plans=ours) for ours, _ in pipes])
    for answers, expected in (
        ((b"", b"", b""), None),
        ((b"", "zu groß".encode(), b"other"), "rank 2: zu groß"),
    ):
        for (_, theirs), answer in zip(pipes, answers, strict=True):
            theirs.send_bytes(answer)
        assert RankGroup.end_recording(group) == expected
