"""Ranks killed while their worker stores blocks in a tier or loads them: streams go on, no hit is torn.

Rank 0 is stopped by a failpoint in the middle of a copy. Then either rank is killed, and rank 0 goes on if it
was the other one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end import tiny_model
from tests.end_to_end.group_tiers import LOADED, completions, tier_blocks, tokens_of
from tests.end_to_end.rank_processes import alone, processes
from tests.faults.conftest import Breakable, breakable
from tests.faults.failpoints import kill
from tests.faults.system import alive, eventually, settle

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
TENSOR = ("--set", "prefill.tensor-parallel=2", "--set", "decode.tensor-parallel=2")
MEMORIES = ("--set", "prefill.own-memories=true", "--set", "decode.own-memories=true")
OWN = (*TENSOR, *MEMORIES)
SYSTEMS = {
    "shared_memory": ("shared_memory", TENSOR, "native"),
    "tcp": ("tcp", TENSOR, "torch"),
    "own-in-place": ("auto", OWN, "torch"),
    "own-tcp": ("tcp", OWN, "torch"),
}
TOKENS = 24


@dataclass
class Tiered:
    """A system of two groups with a disk tier, over a pool that holds one prompt."""

    broken: Breakable
    folder: Path
    model: Path
    backend: str

    def files(self) -> set[Path]:
        """Return the blocks that are stored."""
        return set(self.folder.rglob("*.kv"))

    def expected(self, prompt: list[int]) -> list[list[int]]:
        """Return what one process answers."""
        return alone(self.model, 2, [prompt], TOKENS, backend=self.backend)


@pytest.fixture(scope="module", params=SYSTEMS.values(), ids=SYSTEMS)
def tiered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    transport, degrees, backend = request.param
    folder = tmp_path_factory.mktemp("tier") / "kv"
    model = tiny_model.write(tmp_path_factory.mktemp("odd"), **ODD)
    flags = (*degrees, "--transport", transport, "--kv-tier", f"disk:{folder}:64m", "--kv-blocks", "20")
    flags = (*flags, "--set", f"prefill.backend={backend}", "--set", f"decode.backend={backend}")
    for broken in breakable(tmp_path_factory, model, *flags):
        yield Tiered(broken, folder, model, backend)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
def test_rank_killed_while_blocks_are_stored(tiered: Tiered, victim: int, after: int) -> None:
    prompt = tiny_model.prompt(100 + 10 * victim + after, 90 + victim + after)
    expected, before = tiered.expected(prompt), tiered.files()
    ask = partial(completions, tiered.broken.stack, [prompt], TOKENS)
    _kill_in(tiered, "tiers.copy", after, victim, ask, expected)
    eventually(lambda: len(tiered.files() - before) >= 7, 60, "the second stream's blocks are stored")
    assert tokens_of(ask()) == expected


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
def test_rank_killed_while_blocks_are_loaded(tiered: Tiered, victim: int, after: int) -> None:
    prompt = tiny_model.prompt(200 + 10 * victim + after, 90 + victim + after)
    expected, before = tiered.expected(prompt), tiered.files()
    ask = partial(completions, tiered.broken.stack, [prompt], TOKENS)
    assert tokens_of(ask()) == expected
    eventually(lambda: len(tiered.files() - before) >= 7, 60, "the blocks are stored")
    _forget_pools(tiered)
    _kill_in(tiered, "tiers.write", after, victim, ask, expected)
    _forget_pools(tiered)
    again = ask()
    assert tokens_of(again) == expected
    assert min(tier_blocks(again)) > 0
    assert tiered.broken.stack.metric("decode", LOADED) > 0
    assert tiered.broken.stack.metric("decode", "diptych_kv_tier_entries_damaged") == 0


def _kill_in(
    tiered: Tiered,
    where: str,
    after: int,
    victim: int,
    ask: partial[list[object]],
    expected: list[list[int]],
) -> None:
    """Stop rank 0 of a worker at a failpoint, kill a rank of it, and check the answer and the end of all."""
    stack, armory = tiered.broken.stack, tiered.broken.armory
    armory.arm(where, "freeze", after=after)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask)
        stopped = armory.wait_taken(where)
        (group,) = [ranks for role in ("prefill", "decode") if stopped in (ranks := processes(stack, role))]
        kill(group[victim])
        if victim:
            os.kill(stopped, signal.SIGCONT)
        eventually(lambda: not alive(group), 30, "the whole group is gone")
        assert tokens_of(asked.result()) == expected  # type: ignore[arg-type]
    settle(stack)


def _forget_pools(tiered: Tiered) -> None:
    """Let other prompts take all blocks of the pools, so that the tier alone has those before."""
    for seed in range(3):
        completions(tiered.broken.stack, [tiny_model.prompt(seed, 200)], 2)
