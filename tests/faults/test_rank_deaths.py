"""Workers of two processes each, ranks or stages, of which one dies: streams go on, and all blocks come back.

Rank 0 is stopped where a request enters a state, by a failpoint. Then either rank is killed, and rank 0 goes
on if it was the other one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end import tiny_model
from tests.end_to_end.rank_processes import processes
from tests.faults.conftest import Breakable, breakable
from tests.faults.group_deaths import STATES, kill_in_state, stop_in_step

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

TENSOR = ("--set", "prefill.tensor-parallel=2", "--set", "decode.tensor-parallel=2")
STAGES = ("--set", "prefill.pipeline-parallel=2", "--set", "decode.pipeline-parallel=2")
MEMORIES = ("--set", "prefill.own-memories=true", "--set", "decode.own-memories=true")
OWN = (*TENSOR, *MEMORIES)
OTHERWISE = ("--set", "prefill.tensor-parallel=2", "--set", "decode.pipeline-parallel=2", *MEMORIES)
"""Ranks that hold other shares of a block than those of the other worker."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads two ranks share unevenly."""
    return tiny_model.write(
        tmp_path_factory.mktemp("odd"), num_attention_heads=6, num_key_value_heads=3, hidden_size=96
    )


@pytest.fixture(
    scope="module",
    params=[
        ("shared_memory", TENSOR),
        ("tcp", TENSOR),
        ("shared_memory", STAGES),
        ("tcp", OWN),
        ("auto", OWN),
        ("auto", OTHERWISE),
    ],
    ids=["shared_memory", "tcp", "stages", "own-tcp", "own-in-place", "own-mapped"],
)
def groups(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, odd: Path
) -> Iterator[Breakable]:
    transport, degrees = request.param
    yield from breakable(tmp_path_factory, odd, *degrees, "--transport", transport)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("state", STATES, ids=[where for _, where, _ in STATES])
def test_streams_outlive_a_rank(groups: Breakable, state: tuple[str, str, int], victim: int) -> None:
    kill_in_state(groups, partial(processes, groups.stack), state, victim, gone_s=30)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_outlive_a_rank_that_hangs(groups: Breakable, role: str) -> None:
    stop_in_step(groups, partial(processes, groups.stack), role)
