"""Adapters of rank 0 and of another rank, over the pipes between them: all have one, or none has."""

from __future__ import annotations

import contextlib
import gc
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.adapters.adapter import Adapter, BadAdapter
from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.pipeline import ALONE
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel_model import Dealing, load_parts, open_parts
from diptych.worker_process.group import rank_adapters
from diptych.worker_process.group.group_adapters import GroupAdapters
from diptych.worker_process.group.orders import AdapterOrder
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.shared_memories import SharedMemories
from tests.adapters import write_adapter
from tests.end_to_end import tiny_model


class Ranks:
    """Rank 0's end of one more rank, which is a thread here; both have all parts of the model."""

    def __init__(self, model: Path) -> None:
        opened = open_parts(model, "fp32", Dealing(2))
        self.shape: ModelShape = opened.shape
        own, other = (load_parts(opened, ALONE, StopWord(), 1).backend for _ in range(2))
        assert isinstance(own, PartsBackend)
        assert isinstance(other, PartsBackend)
        self.other = RankAdapters(other)
        ours, theirs = Pipe()
        self.memories = SharedMemories([(0, ours)])
        self.adapters = GroupAdapters(own, self)  # type: ignore[arg-type]
        self.backends = own, other
        threading.Thread(target=self._serve, args=(theirs,), daemon=True).start()

    def _serve(self, control: Connection[Any, Any]) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                control.send(self.other.answer(control.recv()))

    def send_order(self, order: AdapterOrder) -> None:
        self.other.carry_out(order)

    def fail(self, error: BaseException) -> None:
        raise error

    @property
    def loaded(self) -> list[int]:
        """Numbers of the adapters that the other rank has."""
        return sorted(self.other._prepared)

    def slots(self) -> list[list[int]]:
        """Return the slots that are filled, by rank."""
        return [sorted(backend._adapters[0]._slots) for backend in self.backends]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tiny_model.write(tmp_path / "model"))


@pytest.fixture
def adapter(ranks: Ranks, tmp_path: Path) -> Adapter:
    folder = write_adapter(tmp_path / "a", tiny_model.oracle(tmp_path / "model"), seed=1)
    return read_adapter(folder, ranks.shape, 64)


def test_an_adapter_is_loaded_placed_and_forgotten_by_every_rank(ranks: Ranks, adapter: Adapter) -> None:
    one, other = (ranks.adapters.prepare(adapter) for _ in range(2))
    assert ranks.loaded == [0, 1]
    ranks.adapters.set(3, one)
    ranks.adapters.set(4, other)
    assert ranks.slots() == [[3, 4], [3, 4]]
    of_ranks = [backend._adapters[1]._slots[3].layers[1]["down"] for backend in ranks.backends]
    assert torch.equal(of_ranks[0].a, of_ranks[1].a)
    del one
    gc.collect()
    ranks.adapters.forget_dropped()
    assert ranks.loaded == [0, 1], "it lies in a slot"
    ranks.adapters.set(3, None)
    assert ranks.loaded == [1]
    assert ranks.slots() == [[4], [4]]


def test_a_rank_that_cannot_load_fails_it_by_name_and_no_rank_keeps_it(
    ranks: Ranks, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_adapters, "available_memory", lambda: 1000)
    with pytest.raises(BadAdapter, match=r"rank 1: loading takes 0 MiB, and 0 MiB are free"):
        ranks.adapters.prepare(adapter)
    monkeypatch.undo()
    assert ranks.loaded == []
    ranks.adapters.set(0, ranks.adapters.prepare(adapter))  # the control: the rank goes on
    assert ranks.slots() == [[0], [0]]


def test_an_adapter_that_rank_0_cannot_prepare_is_forgotten_elsewhere(
    ranks: Ranks, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Adapter) -> object:
        raise BadAdapter("no room")

    monkeypatch.setattr(ranks.backends[0], "prepare_adapter", fails)
    with pytest.raises(BadAdapter, match="no room"):
        ranks.adapters.prepare(adapter)
    ranks.adapters.forget_dropped()
    assert ranks.loaded == []


def test_every_rank_allows_adapters_or_is_named(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[tuple[int, int]] = []
    for backend in ranks.backends:
        monkeypatch.setattr(backend, "allow_adapters", lambda *given: allowed.append(given))
    assert ranks.adapters.allow(3, 16) is None
    assert allowed == [(3, 16)] * 2
    monkeypatch.setattr(ranks.other, "_backend", object())
    assert ranks.adapters.allow(3, 16) == "rank 1: adapters in parts are not computed by this backend"
