"""Workers of two processes each, ranks or stages, of which one dies: streams go on, and all blocks come back.

Rank 0 is stopped where a request enters a state, by a failpoint. Then either rank is killed, and rank 0 goes
on if it was the other one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end import tiny_model
from tests.end_to_end.rank_processes import processes
from tests.faults.conftest import Breakable, breakable
from tests.faults.failpoints import kill
from tests.faults.requests import ask, check_same, retries
from tests.faults.system import alive, eventually, settle

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

MIX = ("greedy", "seeded", "two choices")
TENSOR = ("--set", "prefill.tensor-parallel=2", "--set", "decode.tensor-parallel=2")
STAGES = ("--set", "prefill.pipeline-parallel=2", "--set", "decode.pipeline-parallel=2")
STATES = [
    ("prefill", "prefill.queued", 0),
    ("prefill", "prefill.asked", 0),
    ("prefill", "prefill.granted", 0),
    ("prefill", "prefill.chunk", 2),
    ("prefill", "prefill.before_commit", 1),
    ("prefill", "prefill.committed", 1),
    ("decode", "decode.verified", 1),
    ("decode", "decode.step", 12),
]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads two ranks share unevenly."""
    return tiny_model.write(
        tmp_path_factory.mktemp("odd"), num_attention_heads=6, num_key_value_heads=3, hidden_size=96
    )


@pytest.fixture(
    scope="module",
    params=[("shared_memory", TENSOR), ("tcp", TENSOR), ("shared_memory", STAGES)],
    ids=["shared_memory", "tcp", "stages"],
)
def groups(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, odd: Path
) -> Iterator[Breakable]:
    transport, degrees = request.param
    yield from breakable(tmp_path_factory, odd, *degrees, "--transport", transport)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("role", "where", "after"), STATES, ids=[where for _, where, _ in STATES])
def test_streams_outlive_a_rank(groups: Breakable, role: str, where: str, after: int, victim: int) -> None:
    """Prompts of another length in every test: cached ones have one chunk."""
    length = 100 + 2 * STATES.index((role, where, after)) + victim
    groups.armory.arm(where, "freeze", after=after)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, groups.address, MIX, length=length)
        stopped = groups.armory.wait_taken(where)
        ranks = processes(groups.stack, role)
        assert ranks[0] == stopped
        assert len(ranks) == 2
        kill(ranks[victim])
        if victim:
            os.kill(stopped, signal.SIGCONT)
        eventually(lambda: not alive(ranks), 30, "the whole group is gone")
        answers = asked.result()
    settle(groups.stack)
    check_same(ask(groups.address, MIX, length=length), answers)
    assert where == "prefill.committed" or retries(answers.values())
    assert len(processes(groups.stack, role)) == 2
    groups.stack.wait_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_outlive_a_rank_that_hangs(groups: Breakable, role: str) -> None:
    """Rank 1 is stopped in a step: rank 0 answers, and its step is late."""
    expected = ask(groups.address, ["greedy"], length=120)
    where = {"prefill": "prefill.granted", "decode": "decode.step"}[role]
    groups.armory.arm(where, "freeze", after=0 if role == "prefill" else 8)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, groups.address, ["greedy"], length=121)
        stopped = groups.armory.wait_taken(where)
        ranks = processes(groups.stack, role)
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(stopped, signal.SIGCONT)
        time.sleep(3)
        kill(ranks[1])
        answers = asked.result()
    settle(groups.stack)
    check_same(ask(groups.address, ["greedy"], length=121), answers)
    check_same(expected, ask(groups.address, ["greedy"], length=120))
