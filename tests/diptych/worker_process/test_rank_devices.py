"""Each rank's device, by its host and the GPUs there."""

from __future__ import annotations

import pytest

from diptych.worker_process.group.rank_devices import device_here, rank_devices


@pytest.mark.parametrize(
    ("first", "hosts", "devices"),
    [
        ("cpu", ["a", "a", "b"], ["cpu", "cpu", "cpu"]),
        ("cuda:0", ["a", "a", "a"], ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:2", ["a", "a"], ["cuda:2", "cuda:3"]),
        ("cuda", ["a", "a"], ["cuda:0", "cuda:1"]),
        ("cuda:4", ["a", "a", "b", "c", "b"], ["cuda:4", "cuda:5", "cuda:0", "cuda:0", "cuda:1"]),
    ],
)
def test_ranks_of_a_host_have_its_gpus_in_a_row(first: str, hosts: list[str], devices: list[str]) -> None:
    assert rank_devices(first, hosts) == devices


def test_ranks_beyond_the_gpus_of_a_host_share_them() -> None:
    assert [device_here(f"cuda:{number}", 2) for number in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert device_here("cpu", 0) == "cpu"
    assert device_here("cuda:1", 0) == "cuda:1", "what is wrong is said by what opens it"
