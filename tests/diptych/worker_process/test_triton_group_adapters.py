"""Adapters of a group on the Triton step, over pipes: allowed, loaded, and placed among plans of steps.

Ranks are threads, and a recording is the work done anew.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backend import AdapterBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.sampling import Sampled
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.worker_process.group.triton_group_backend import TritonGroupBackend
from tests.adapters import merged, write_adapter
from tests.diptych.engine.backends.triton.test_parts_adapters import greedy_of
from tests.diptych.engine.backends.triton.test_parts_backend import TritonRanks
from tests.diptych.engine.models.family_models import config_of, oracle_of, save, text_of
from tests.diptych.worker_process.test_triton_group import GREEDILY, MEMORY, Group

TOKENS, LENGTH = 9, 20
NAMES = ("base", "a", "b", "c")
RANK = 8

pytestmark = pytest.mark.usefixtures("one_thread")


class Served:
    """Rank 0's backend over a group of two, in which adapters lie in two slots."""

    def __init__(self, folder: Path) -> None:
        oracle = oracle_of(config_of("smollm3"))
        self.opened = open_checkpoint(save(oracle, folder / "model"), "fp32")
        folders = {name: write_adapter(folder / name, oracle, seed=ord(name)) for name in NAMES[1:]}
        self.adapters = {name: read_adapter(path, self.opened.shape, RANK) for name, path in folders.items()}
        self.texts = {name: text_of(LENGTH, seed=number) for number, name in enumerate(NAMES)}
        models = {"base": oracle, **{name: merged(oracle, path) for name, path in folders.items()}}
        self.expected = {name: greedy_of(models[name], self.texts[name], TOKENS) for name in NAMES}
        ranks = TritonRanks(self.opened, 2, 2, on_device=True)
        self.group = Group(ranks, ranks.memory(4 * len(NAMES)))
        self.memory = self.group.memories.mapped[MEMORY]
        self.backend = TritonGroupBackend(ranks.backends[0], cast(Any, self.group))
        self.backend.plan_decode(4, self.memory.layout.block_size)
        self.backend.prepare_decode(self.memory)
        self.found: dict[str, list[int]] = {name: [] for name in NAMES}

    def step(self, name: str, slot: int | None, follows: int | None = None, ahead: int = 0) -> SequenceStep:
        """Return the next step of a text; `ahead` of its tokens are on their way."""
        number, done = NAMES.index(name), self.found[name]
        tokens = done[-1:] if done else self.texts[name]
        start = LENGTH - 1 + len(done) + ahead if done else 0
        table = range(4 * number, 4 * number + 4)
        return SequenceStep(self.memory, table, start, tokens, True, 1, follows, slot)

    def prompt(self, name: str, slot: int | None) -> None:
        """Compute a prompt, in a step that is not recorded."""
        [token] = self.backend.forward_and_sample([self.step(name, slot)], [GREEDILY], None).tokens
        self.take([name], [token])

    def launch(self, rows: Sequence[tuple[str, int | None]], ahead: int = 0) -> Any:
        """Launch a step of rows, each of which follows its own of the one before if that is on its way."""
        steps = [
            self.step(name, slot, row if ahead else None, ahead) for row, (name, slot) in enumerate(rows)
        ]
        launched = self.backend.launch(steps, [GREEDILY] * len(rows), None)
        assert launched is not None
        return launched

    def take(self, names: Sequence[str], tokens: Sequence[Any]) -> None:
        for name, token in zip(names, tokens, strict=True):
            assert isinstance(token, Sampled)
            self.found[name].append(token.token_id)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.group.end()


def test_adapters_are_placed_and_replaced_between_launched_steps(served: Served) -> None:
    """Slot 1 gets another adapter while a step of other rows is on its way, on both ranks at one place."""
    backend = served.backend
    assert isinstance(backend, AdapterBackend)
    assert backend.allow_adapters(2, RANK) is None
    for slot, name in enumerate(("a", "b")):
        backend.set_adapter(slot, backend.prepare_adapter(served.adapters[name]))
    rows = [("base", None), ("a", 0), ("b", 1)]
    names = [name for name, _ in rows]
    for name, slot in rows:
        served.prompt(name, slot)
    answers = served.group.answers
    waiting = served.launch(rows)
    for _ in range(3):
        following = served.launch(rows, ahead=1)
        served.take(names, waiting.collect().tokens)
        waiting = following
    served.take(names, waiting.collect().tokens)
    assert served.group.answers == answers + 1, "the recording is answered, and no step of it"

    assert sorted(served.group.adapters._prepared) == [0, 1]
    waiting = served.launch(rows[:2])
    backend.set_adapter(1, backend.prepare_adapter(served.adapters["c"]))
    gc.collect()
    served.take(names[:2], waiting.collect().tokens)
    served.prompt("c", 1)
    assert sorted(served.group.adapters._prepared) == [0, 2], "what lies in no slot is forgotten"
    rows[2:] = [("c", 1)]
    for _ in range(2):
        served.take([name for name, _ in rows], served.launch(rows).collect().tokens)
    backend.set_adapter(0, None)
    served.take(["c"], served.launch(rows[2:]).collect().tokens)
    for name in NAMES:
        assert len(served.found[name]) > 3
        assert served.found[name] == served.expected[name][: len(served.found[name])], name


def test_an_adapter_that_one_rank_places_later_gives_other_text(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: rank 1 computes the steps with what lay in the slot before."""
    backend = served.backend
    assert backend.allow_adapters(1, RANK) is None
    backend.set_adapter(0, backend.prepare_adapter(served.adapters["b"]))
    following = backend.prepare_adapter(served.adapters["a"])
    monkeypatch.setattr(served.group.adapters, "carry_out", lambda order: None)
    backend.set_adapter(0, following)
    served.prompt("a", 0)
    for _ in range(TOKENS - 1):
        served.take(["a"], served.launch([("a", 0)]).collect().tokens)
    assert served.found["a"] != served.expected["a"]
