"""The campaigns of faults in small forms: what they find has to be right here too, times are not judged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.adapters import write_adapter
from tests.diptych.worker_process.test_medusa_loader import write_heads
from tests.end_to_end import knowing_head, tiny_model
from tests.faults import corruptions, disconnects, group_kill, kill_matrix, next_token, pull_kills
from tests.faults.conftest import Breakable, breakable
from tests.faults.requests import ASKS, TOKENS, ask, prompt_of
from tests.faults.states import LOCAL_STATES, STATES, Victim
from tests.faults.system import PAIRS, breakable_system

FEW = [("S3", "gateway"), ("S5", "decode"), ("S4", "pair"), ("S8", "all decode")]
MORE = [("S0", "redis"), ("S9", "prefill")]
FEW_LOCAL = [("L3", "gateway"), ("L3", "decode")]
MORE_LOCAL = [("L2", "decode"), ("L4", "prefill")]


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[Breakable]:
    flags = ("--transport", "tcp", "--set", "prefill.pull-prefixes=always")
    with breakable_system(*flags) as (system, _):
        yield system


@pytest.mark.parametrize("cells", [FEW, pytest.param(MORE, marks=pytest.mark.full)], ids=["few", "more"])
def test_no_token_is_lost_whoever_is_killed(
    pairs: Breakable, tiny: Path, cells: list[tuple[str, Victim]]
) -> None:
    states = {state.name: state for state in STATES}
    matrix = kill_matrix.run(pairs, tiny, [(states[name], victim) for name, victim in cells])
    assert len(matrix.cells) == len(cells)
    wrong = [one for one in matrix.failures if "clean after" not in one]
    assert not wrong


@pytest.mark.parametrize(
    "cells", [FEW_LOCAL, pytest.param(MORE_LOCAL, marks=pytest.mark.full)], ids=["few", "more"]
)
def test_no_token_of_a_local_prompt_is_lost_whoever_is_killed(
    local_pairs: Breakable, tiny: Path, cells: list[tuple[str, Victim]]
) -> None:
    states = {state.name: state for state in LOCAL_STATES}
    matrix = kill_matrix.run(local_pairs, tiny, [(states[name], victim) for name, victim in cells])
    assert len(matrix.cells) == len(cells)
    assert not [one for one in matrix.failures if "clean after" not in one]


WITH_HEADS = [
    ("S3", "decode"),
    ("S4", "prefill"),
    ("S5", "decode"),
    ("S8", "decode"),
    ("S8", "pair"),
    ("S9", "decode"),
]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("drafts", "tree"),
    [("eagle", ""), ("eagle", "3,2,1"), ("eagle", "dynamic:9,4,3"), ("medusa", "3,2,1")],
)
def test_no_token_is_lost_with_heads(
    drafts: str, tree: str, tiny: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The EAGLE head knows what is asked: its drafts are right, before and after a worker dies."""
    if drafts == "medusa":
        heads = write_heads(tmp_path / "heads", tiny)
    else:
        heads = knowing_head.write(tmp_path / "heads", tiny, [prompt_of("greedy")], TOKENS)
    flags = [*PAIRS, "--speculative-model", str(heads)]
    flags += ["--speculative-tree", tree] if tree else []
    states = {state.name: state for state in STATES}
    with contextmanager(breakable)(tmp_path_factory, tiny, *flags) as system:
        drafted = "diptych_spec_decode_draft_tokens_total"
        for _ in range(5):  # before workers that counted are killed; on a busy machine drafts may not pay
            ask(system.address, ["greedy"])
            if any(system.stack.metric("decode", drafted, number) for number in range(2)):
                break
        else:
            pytest.fail("nothing was drafted")
        matrix = kill_matrix.run(system, tiny, [(states[name], victim) for name, victim in WITH_HEADS])
    assert len(matrix.cells) == len(WITH_HEADS)
    assert not [one for one in matrix.failures if "clean after" not in one]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_token_is_lost_with_adapters(
    tiny: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The base and two adapters decode side by side while their workers and a gateway are killed."""
    base = tiny_model.oracle(tiny)
    loras = [write_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate("ab")]
    flags = [*PAIRS, *(f"--lora={path.name}={path}" for path in loras)]
    chosen = {"greedy": "a", "seeded": "b", "two choices": "a", "logprobs": ""}
    asks = {name: {**ASKS[name], **({"lora": lora} if lora else {})} for name, lora in chosen.items()}
    cells = [*FEW, *MORE, *WITH_HEADS]
    states = {state.name: state for state in STATES}
    with contextmanager(breakable)(tmp_path_factory, tiny, *flags) as system:
        plain = ask(system.address, ["greedy"])
        matrix = kill_matrix.run(system, tiny, [(states[name], victim) for name, victim in cells], asks=asks)
        adapted = ask(system.address, ["greedy"], asks=asks)
    assert adapted["greedy"].choices != plain["greedy"].choices, "the adapter says something of its own"
    assert not [one for one in matrix.failures if "clean after" not in one]


def test_streams_that_are_hit_go_on(pairs: Breakable) -> None:
    """Kill a worker under streams, and stop one."""
    blows = [("SIGKILL", "decode"), ("SIGSTOP", "decode")]
    measured = next_token.measure(pairs, blows)
    assert not measured.failures
    assert all(measured.waits_s[blow] for blow in blows), "nobody was hit"


def test_damaged_blocks_are_never_read(over_tcp: Breakable) -> None:
    measured = asyncio.run(corruptions.run(over_tcp, 40))
    assert not measured.failures
    assert all(measured.damaged[kind] >= 10 for kind in corruptions.KINDS)
    assert measured.ended["exact"] + measured.ended["exact after a retry"]


@pytest.mark.parametrize(
    ("number", "victim"), [pytest.param(0, "prefill", marks=pytest.mark.full), (1, "decode")]
)
def test_pull_whose_either_side_dies_costs_no_token(over_tcp: Breakable, number: int, victim: Victim) -> None:
    pull_kills.strike(over_tcp, pull_kills.STATES[number], victim, "killed")


def test_clients_that_leave_take_nothing_with_them(over_tcp: Breakable) -> None:
    measured = asyncio.run(disconnects.run(over_tcp, 100))
    assert not measured.failures
    assert measured.before_first_token


@pytest.mark.full  # that nothing stays of a killed supervisor is shown by the launcher's tests, too
def test_nothing_stays_of_a_killed_group(tiny: Path) -> None:
    processes, left = group_kill.kill_group(tiny)
    assert processes >= 6
    assert not left
