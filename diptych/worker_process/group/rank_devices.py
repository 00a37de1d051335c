"""Devices of the ranks of one group. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def rank_devices(first: str, hosts: Sequence[str]) -> list[str]:
    """Return the device of each rank, by its host: rank 0 has `first`, the others of its host the GPUs behind
    it, and ranks of every other host its GPUs from the first on.

    A rank counts the GPUs of its own host (`device_here`).
    """
    if not first.startswith("cuda"):
        return [first] * len(hosts)
    taken = {hosts[0]: int(first.partition(":")[2] or 0)}
    devices = []
    for host in hosts:
        number = taken.get(host, 0)
        devices.append(f"cuda:{number}")
        taken[host] = number + 1
    return devices


def device_here(device: str, count: int) -> str:
    """Return the device of a rank on a host with `count` GPUs: ranks beyond these share them from the first
    on.
    """
    kind, _, number = device.partition(":")
    return device if kind != "cuda" or count < 1 else f"cuda:{int(number or 0) % count}"
