"""Cores lent between processes: each sees the other's changes at once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.engine.shared_cores import SharedCores
from kernels.cpu.library import CORE_CLAIMED

CORES = 3
NEIGHBOUR = """
import sys
from diptych.engine.shared_cores import SharedCores
share = SharedCores(int(sys.argv[1]), home=[1, 2], cores=3)
print("here", flush=True)
for line in sys.stdin:
    match line.strip():
        case "claim": share.claim(); print("ok", flush=True)
        case "yield": share.yield_(); print("ok", flush=True)
        case "wait": share.backlog.set(0.25); print("ok", flush=True)
        case "free": print(share.num_idle(), share.backlog.of_others_s(), flush=True)
"""


class Neighbour:
    """Another process with two home cores."""

    def __init__(self, fd: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR, str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert self._said() == "here"

    def do(self, word: str) -> str:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)
        return self._said()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("cores", 0)
    yield number
    os.close(number)


@pytest.fixture
def neighbour(fd: int) -> Iterator[Neighbour]:
    other = Neighbour(fd)
    yield other
    other.end()


def test_claimed_cores_are_not_idle_and_yielded_ones_are(fd: int, neighbour: Neighbour) -> None:
    ours = SharedCores(fd, home=[0], cores=CORES)
    assert (ours.num_home, ours.others) == (1, [1, 2])
    assert ours.num_idle() == 2
    neighbour.do("claim")
    assert ours.num_idle() == 0
    assert neighbour.do("free") == "1 None"
    ours.claim()
    assert neighbour.do("free") == "0 None"
    neighbour.do("yield")
    assert ours.num_idle() == 2


def test_yielding_again_keeps_borrowers(fd: int) -> None:
    ours, theirs = SharedCores(fd, home=[0], cores=CORES), SharedCores(fd, home=[1, 2], cores=CORES)
    claimed = (ctypes.c_uint8 * CORES).from_address(ours.address)
    claimed[0] = CORE_CLAIMED
    ours.yield_()
    assert (claimed[0], theirs.num_idle()) == (CORE_CLAIMED, 0)
    ours.claim()
    ours.yield_()
    assert theirs.num_idle() == 1


def test_a_core_is_spare_unless_its_owner_has_claimed_it(fd: int) -> None:
    ours, theirs = SharedCores(fd, home=[0], cores=CORES), SharedCores(fd, home=[1, 2], cores=CORES)
    assert ours.has_spare()
    theirs.claim()
    assert not ours.has_spare()
    assert theirs.has_spare()
    (ctypes.c_uint8 * CORES).from_address(ours.address)[2] = CORE_CLAIMED  # borrowed, and not needed
    assert ours.has_spare()


def test_others_see_a_backlog(fd: int, neighbour: Neighbour) -> None:
    ours = SharedCores(fd, home=[0], cores=CORES)
    assert ours.backlog.of_others_s() is None
    neighbour.do("wait")
    assert ours.backlog.of_others_s() == 0.25
    assert neighbour.do("free") == "1 None"  # of its own word it takes no notice
    ours.backlog.set(0.0)
    assert neighbour.do("free") == "1 0.0"
    ours.backlog.set(None)
    assert neighbour.do("free") == "1 None"


@pytest.mark.parametrize(
    ("waited", "heard"), [(0.0, 0.0), (0.01, 0.0), (0.04, 0.03125), (1.0, 1.0), (1000.0, 7.9375)]
)
def test_a_backlog_is_encoded_in_one_byte(fd: int, waited: float, heard: float) -> None:
    ours, theirs = SharedCores(fd, home=[0], cores=CORES), SharedCores(fd, home=[1, 2], cores=CORES)
    theirs.backlog.set(waited)
    assert ours.backlog.of_others_s() == heard


def test_the_longest_backlog_counts(fd: int) -> None:
    ours = SharedCores(fd, home=[0], cores=CORES)
    SharedCores(fd, home=[1], cores=CORES).backlog.set(0.5)
    SharedCores(fd, home=[2], cores=CORES).backlog.set(0.25)
    assert ours.backlog.of_others_s() == 0.5


def test_a_successor_resets_the_state_of_a_killed_worker(fd: int, neighbour: Neighbour) -> None:
    ours = SharedCores(fd, home=[0], cores=CORES)
    neighbour.do("claim")
    neighbour.do("wait")
    neighbour.end()
    assert ours.num_idle() == 0
    successor = Neighbour(fd)
    try:
        assert ours.num_idle() == 2
        assert ours.backlog.of_others_s() is None
    finally:
        successor.end()


@pytest.mark.parametrize("home", [[], [3], [-1]])
def test_home_cores_must_exist(fd: int, home: list[int]) -> None:
    with pytest.raises(ValueError, match="home cores"):
        SharedCores(fd, home=home, cores=CORES)
