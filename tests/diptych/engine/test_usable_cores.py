"""Cores under limits: files as the kernel writes them, in folders of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diptych.engine import usable_cores as module
from diptych.engine.runner import Runner
from diptych.engine.usable_cores import cpu_limit, usable_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def own_groups(tmp_path: Path) -> Path:
    return tmp_path / "proc" / "cgroup"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def test_limits_are_read_where_the_own_group_is_the_root(own_groups: Path, root: Path) -> None:
    write(own_groups, "0::/\n")
    write(root / "cpu.max", "350000 100000\n")
    assert cpu_limit(own_groups, root) == 3.5


def test_the_tightest_group_around_the_process_counts(own_groups: Path, root: Path) -> None:
    write(own_groups, "0::/pods.slice/pod1/worker\n")
    write(root / "pods.slice/pod1/worker/cpu.max", "max 100000\n")
    write(root / "pods.slice/pod1/cpu.max", "400000 100000\n")
    write(root / "pods.slice/cpu.max", "800000 100000\n")
    assert cpu_limit(own_groups, root) == 4


def test_limits_are_read_where_the_path_is_that_of_the_host(own_groups: Path, root: Path) -> None:
    write(own_groups, "5:memory:/docker/0f\n4:cpu,cpuacct:/docker/0f\n0::/\n")
    write(root / "cpu/cpu.cfs_quota_us", "200000\n")
    write(root / "cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_limit(own_groups, root) == 2


def test_absent_limits_give_none(own_groups: Path, root: Path) -> None:
    assert cpu_limit(own_groups, root) is None, "no groups at all"
    write(own_groups, "4:cpu:/\n0::/\n")
    write(root / "cpu/cpu.cfs_quota_us", "-1\n")
    write(root / "cpu/cpu.cfs_period_us", "100000\n")
    write(root / "cpu.max", "max 100000\n")
    assert cpu_limit(own_groups, root) is None


@pytest.mark.parametrize(("limit", "cores"), [(None, 8), (3.5, 3), (0.5, 1), (64.0, 8)])
def test_whole_cores_within_affinity_and_limit(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(module, "cpu_limit", lambda: limit)
    assert usable_cores() == cores


def test_a_worker_computes_on_no_more_threads_than_its_limit_has_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 64 of them under a limit of four, every step waited until the next tenth of a second began."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(module, "cpu_limit", lambda: 4.0)
    model = type("Model", (), {"backend": object()})()
    assert Runner(model, 0).threads == 4
