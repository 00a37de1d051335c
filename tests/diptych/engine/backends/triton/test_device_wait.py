"""Naps within decode steps: most of a step is slept through, and its end is not."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.backends.triton.device_wait import StepNap, wait_for_stream


class Device:
    """Steps on a clock of its own: one that is waited for takes the time to its end."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds

    def step(self, seconds: float) -> Step:
        return Step(self, self.now + seconds)


class Step:
    def __init__(self, device: Device, end: float) -> None:
        self._device, self._end = device, end

    def query(self) -> bool:
        return self._device.now >= self._end

    def synchronize(self) -> None:
        self._device.now = max(self._device.now, self._end)


def run(nap: StepNap, device: Device, lengths: list[float], kind: int = 8) -> list[float]:
    """Wait for steps in a row; return by how much each was noticed late."""
    late = []
    for seconds in lengths:
        step, end = device.step(seconds), device.now + seconds
        nap.wait(kind, device.now, step)
        late.append(device.now - end)
    return late


def test_most_of_a_step_is_slept_through_and_its_end_is_noticed_at_once() -> None:
    device = Device()
    nap = StepNap(device.clock, device.sleep)
    assert max(run(nap, device, [0.005] * 50)) == pytest.approx(0.0)
    assert len(device.slept) == 46, "nothing is known of the first"
    assert all(seconds == pytest.approx(0.75 * 0.005) for seconds in device.slept)


def test_a_step_that_is_suddenly_short_is_noticed_late_once() -> None:
    device = Device()
    nap = StepNap(device.clock, device.sleep)
    run(nap, device, [0.010] * 5)
    late = run(nap, device, [0.006] * 9)
    assert late[0] == pytest.approx(0.0015)
    assert max(late[1:]) == pytest.approx(0.0)
    assert device.slept[-1] == pytest.approx(0.75 * 0.006), "what it takes now was found anew"


def test_steps_that_vary_are_expected_to_be_short() -> None:
    device = Device()
    nap = StepNap(device.clock, device.sleep)
    late = run(nap, device, [0.004, 0.012, 0.005, 0.020, 0.004, 0.009] * 5)
    assert max(late) == pytest.approx(0.0)
    assert device.slept, "what is spared is little, not nothing"


def test_short_steps_and_new_kinds_are_not_slept_through() -> None:
    device = Device()
    nap = StepNap(device.clock, device.sleep)
    run(nap, device, [0.0006] * 20)
    run(nap, device, [0.005], kind=16)
    assert device.slept == []


def test_a_step_launched_behind_another_begins_when_that_one_ends() -> None:
    device = Device()
    nap = StepNap(device.clock, device.sleep)
    launched, end = device.now, device.now
    for _ in range(9):
        end += 0.005
        nap.wait(1, launched, Step(device, end))
        assert device.now == pytest.approx(end)
        launched = device.now - 0.004  # while the one before was running
    assert all(seconds == pytest.approx(0.75 * 0.005) for seconds in device.slept)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4096])
def test_the_stream_is_done_after_the_wait(tokens: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda._sleep(50_000_000)
    assert not torch.cuda.current_stream().query()
    wait_for_stream(tokens)
    assert torch.cuda.current_stream().query()
