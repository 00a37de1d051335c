"""Waiting times that the workers of one device show each other."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from diptych.engine.backend import Backend
from diptych.engine.cpu_policy import CpuPolicy
from diptych.engine.shared_backlog import SharedBacklog
from diptych.engine.shared_cores import SharedCores
from diptych.engine.step_pacing import StepPacing

CORES = 2


class OfNoCores(Backend):
    """Backend of a device: it computes nothing here and takes any number of threads."""

    def set_threads(self, threads: int) -> None:
        """Leave the threads as they are."""


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("backlog")
    yield made
    os.close(made)


def on(fd: int, own: int, gpu: int | None = 0) -> SharedBacklog:
    return SharedBacklog(fd, own=own, cores=CORES, gpu=gpu)


def test_workers_of_one_gpu_hear_each_other_and_nobody_else(fd: int) -> None:
    first, second = on(fd, 0), on(fd, 1)
    strangers = [on(fd, 1, gpu=1), on(fd, 1, gpu=None), SharedCores(fd, home=[1], cores=CORES).backlog]
    first.set(0.5)
    assert second.of_others_s() == 0.5
    assert first.of_others_s() is None
    assert [one.of_others_s() for one in strangers] == [None, None, None]
    first.set(None)
    assert second.of_others_s() is None


def test_a_successor_clears_the_byte_of_a_killed_worker(fd: int) -> None:
    other = on(fd, 1)
    on(fd, 0).set(2.0)
    assert other.of_others_s() == 2.0
    on(fd, 0)
    assert other.of_others_s() is None


def test_decode_on_a_gpu_pauses_while_prompts_wait_for_it(fd: int) -> None:
    prefill = CpuPolicy(OfNoCores(), 1, backlog=on(fd, 0))
    decode = CpuPolicy(OfNoCores(), 1, backlog=on(fd, 1), pacing=StepPacing(1.5, 1.5))
    elsewhere = CpuPolicy(OfNoCores(), 1, backlog=on(fd, 1, gpu=1), pacing=StepPacing(1.5, 1.5))
    for one in (decode, elsewhere):
        one.begin_decode(10.0)
        one.end_decode(10.5)
    assert (decode.pause_s(10.5), decode.may_launch_ahead()) == (0.0, True)
    prefill.set_backlog(0.0)
    assert (decode.pause_s(10.5), decode.slack_s(), decode.may_launch_ahead()) == (0.25, 0.25, False)
    assert (elsewhere.pause_s(10.5), elsewhere.may_launch_ahead()) == (0.0, True)
    prefill.yield_()
    assert decode.pause_s(10.5) == 0.0
