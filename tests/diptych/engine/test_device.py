"""Choice of the device, and the memory that a KV pool leaves of it."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.device import DeviceUnavailable, choose_device, pool_bytes

GIB = 1 << 30


def test_auto_is_the_cpu_where_torch_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    for asked in ("cuda", "cuda:1"):
        with pytest.raises(DeviceUnavailable, match=f"device {asked}: torch .* CUDA"):
            choose_device(asked)


def test_auto_is_the_first_gpu_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(DeviceUnavailable, match="there are 2"):
        choose_device("cuda:2")


def test_a_pool_takes_its_share_and_leaves_what_is_not_free() -> None:
    def room(**changes: float) -> int:
        sizes = {
            "total": 100 * GIB,
            "free": 80 * GIB,
            "used": 20 * GIB,
            "recordings": 0,
            "temporaries": 0,
            **changes,
        }
        return pool_bytes(utilization=sizes.pop("utilization", 0.9), **{k: int(v) for k, v in sizes.items()})

    whole = room()
    assert 69 * GIB < whole < 70 * GIB
    assert room(utilization=0.45) == whole - 45 * GIB
    assert room(free=30 * GIB) == whole - 40 * GIB  # another process is on this GPU
    assert room(recordings=10) < whole
    assert room(temporaries=3 * GIB) == whole - 3 * GIB
    assert room(utilization=0.1) <= 0
