"""Lending cores between real processes: record locks belong to a process, so one process proves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core_share import CoreShare

CORES = 3
NEIGHBOUR = """
import sys
from engine.core_share import CoreShare
share = CoreShare(int(sys.argv[1]), home=[1, 2], cores=3)
for line in sys.stdin:
    match line.strip():
        case "begin": print(share.begin_step(), flush=True)
        case "end": share.end_step(); print("ok", flush=True)
        case "rest": share.rest(); print("ok", flush=True)
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
            cwd=Path(__file__).parents[2],
        )

    def do(self, word: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(word, file=self.process.stdin, flush=True)
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
    other.process.kill()
    other.process.communicate()


def test_idle_cores_are_borrowed_and_given_back_after_the_step(fd: int, neighbour: Neighbour) -> None:
    ours = CoreShare(fd, home=[0], cores=CORES)
    assert ours.begin_step() == 3
    assert neighbour.do("begin") == "2"  # its own count although they are lent out
    ours.end_step()
    assert neighbour.do("begin") == "2"  # now it really holds them
    assert ours.begin_step() == 1


def test_a_busy_neighbour_keeps_its_cores_between_its_steps(fd: int, neighbour: Neighbour) -> None:
    ours = CoreShare(fd, home=[0], cores=CORES)
    assert neighbour.do("begin") == "3"
    assert neighbour.do("end") == "ok"
    assert ours.begin_step() == 1
    ours.end_step()
    assert neighbour.do("begin") == "2"  # ours is held too: we may have a next step


def test_who_rests_lends_everything(fd: int, neighbour: Neighbour) -> None:
    ours = CoreShare(fd, home=[0], cores=CORES)
    assert ours.begin_step() == 3
    ours.end_step()
    ours.rest()
    assert neighbour.do("begin") == "3"
    assert neighbour.do("rest") == "ok"
    assert ours.begin_step() == 3


def test_a_killed_neighbour_holds_nothing(fd: int, neighbour: Neighbour) -> None:
    ours = CoreShare(fd, home=[0], cores=CORES)
    assert neighbour.do("begin") == "3"
    assert ours.begin_step() == 1
    ours.end_step()
    neighbour.process.kill()
    neighbour.process.wait()
    assert ours.begin_step() == 3


@pytest.mark.parametrize("home", [[], [3], [-1]])
def test_home_cores_must_exist(fd: int, home: list[int]) -> None:
    with pytest.raises(ValueError, match="home cores"):
        CoreShare(fd, home=home, cores=CORES)
