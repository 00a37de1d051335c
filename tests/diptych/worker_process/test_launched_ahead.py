"""Decode steps launched before the tokens of the one before are known: the same tokens, greedy and sampled,
with finishes, cancels, preemptions and lost gateways in between, and every block comes back.

There are two that are given steps ahead. The device is the CPU, and its kernels are their meanings; loops,
buffers and pipeline are those of a GPU. The native step has a thread of its own, and launches greedy rows.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from diptych.engine.backends.native import rotations
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.rotations import Rotations
from diptych.engine.backends.triton.decode_graphs import DecodeGraphs
from diptych.engine.batch import AbortWords, Launched, SequenceStep
from diptych.engine.cpu_policy import CpuPolicy
from diptych.engine.sampling import SampleRow
from diptych.engine.shared_cores import SharedCores
from diptych.worker_process.step_thread import InFlight
from tests.diptych.worker_process import test_random_choices, test_random_interleavings
from tests.diptych.worker_process.both_workers import MODELS, VOCABULARY, greedy, house
from tests.diptych.worker_process.complaints import complaints
from tests.diptych.worker_process.scripted_gateway import Gateway, work

Draws = Sequence[SampleRow | None]


LAUNCHING = {"device": (DecodeGraphs, "_read"), "native": (NativeBackend, "_collect")}
"""By backend: what launches, and its method that waits for a step."""


@pytest.fixture(params=LAUNCHING)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def launches(backend: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts rows that were launched: those that follow a row, and others."""
    counted: Counter[str] = Counter()
    owner: Any = LAUNCHING[backend][0]
    launch = owner.launch

    def counting(
        self: Any, sequences: Sequence[SequenceStep], draws: Draws, abort: AbortWords | None
    ) -> Launched | None:
        launched: Launched | None = launch(self, sequences, draws, abort)
        if launched is not None:
            counted.update("others" if step.follows is None else "following" for step in sequences)
        return launched

    monkeypatch.setattr(owner, "launch", counting)
    return counted


async def test_greedy_requests_in_random_order(
    backend: str, launches: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_interleavings, "REQUESTS", 70)
    async with house("shared_memory", decodes=2, prefills=2, blocks=20, backend=backend) as made:
        walk = test_random_interleavings.Walk(made, 3)
        await walk.run()
        assert await made.empty() == []
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 0, walk.outcomes
    assert walk.outcomes["cancelled"] > 0, walk.outcomes
    assert launches["following"] > 0, launches


async def test_sampled_choices_and_beams_in_random_order(
    backend: str, launches: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_choices, "REQUESTS", 60)
    async with house("shared_memory", prefills=2, blocks=20, backend=backend) as made:
        walk = test_random_choices.Walk(made, 4)
        await walk.run()
        assert await made.empty() == []
        await walk.gateway.close()
    assert complaints(caplog) == []
    assert walk.outcomes["decode finished"] > 10, walk.outcomes
    assert walk.outcomes["decode preempted"] > 0, walk.outcomes
    # Those who draw here draw warm, which the native step leaves to others.
    assert (launches["following"] > 0) == (backend == "device"), launches


async def test_a_lone_request_follows_from_its_third_token_on(backend: str, launches: Counter[str]) -> None:
    prompt = (5, 9, 2)
    async with house("shared_memory", blocks=24, backend=backend) as made:
        gateway = Gateway(made)
        heard = gateway.start(made.decodes[0], made.prefills[0], work(("r", 1), prompt, 20))
        await heard.ended.wait()
        assert tuple(heard.tokens) == greedy(prompt, 20)
        assert await made.empty() == []
        await gateway.close()
    if backend == "device":
        assert launches == {"others": 1, "following": 18}  # the first token came with the prompt
    assert launches.total() == 19
    assert launches["following"] > 0  # natively as soon as the prefill worker rests
    assert made.decodes[0].loop.steps == 19


async def test_native_steps_are_launched_again_once_the_rotary_tables_have_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sequence beyond them is computed on the engine's thread, where they are made."""
    monkeypatch.setattr(rotations, "FIRST_POSITIONS", 16)
    reached: list[tuple[int, threading.Thread]] = []
    launched: list[int] = []
    reach, launch = Rotations.reach, NativeBackend.launch

    def reaching(self: Rotations, positions: int) -> None:
        before = self.positions
        reach(self, positions)
        if 0 < before < self.positions:
            reached.append((self.positions, threading.current_thread()))

    def launching(self: NativeBackend, sequences: Sequence[SequenceStep], *rest: Any) -> Any:
        step = launch(self, sequences, *rest)
        if step is not None:
            launched.append(sequences[0].start)
        return step

    monkeypatch.setattr(Rotations, "reach", reaching)
    monkeypatch.setattr(NativeBackend, "launch", launching)
    async with house("shared_memory", blocks=24, backend="native") as made:
        gateway = Gateway(made)
        heard = gateway.start(made.decodes[0], made.prefills[0], work(("r", 1), (5, 9, 2), 60))
        await heard.ended.wait()
        assert tuple(heard.tokens) == greedy((5, 9, 2), 60)
        assert await made.empty() == []
        await gateway.close()
    assert [positions for positions, _ in reached] == [32, 64]
    assert threading.main_thread() not in [thread for _, thread in reached]
    assert launched == [start for start in range(3, 62) if start not in (16, 32)]


@pytest.mark.parametrize("failing", ["launch ahead", "collect"])
async def test_a_step_that_fails_on_the_device_is_computed_again(
    backend: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in eight times: the rows are computed alone, and no step follows tokens that were not read."""
    calls = Counter[str]()
    owner: Any
    owner, waiting = LAUNCHING[backend]
    launch, read = owner.launch, getattr(owner, waiting)

    def launching(self: Any, sequences: Sequence[SequenceStep], *rest: Any) -> Any:
        calls["launch"] += 1
        if failing == "launch ahead" and sequences[0].follows is not None and calls["launch"] % 8 == 0:
            raise RuntimeError("no room for a launch")
        return launch(self, sequences, *rest)

    def reading(self: Any, *rest: Any) -> Any:
        calls["read"] += 1
        drawn = read(self, *rest)
        if failing == "collect" and calls["read"] % 8 == 0:
            raise RuntimeError("the device gave nothing")
        return drawn

    monkeypatch.setattr(owner, "launch", launching)
    monkeypatch.setattr(owner, waiting, reading)
    prompts = [tuple((7 * n + k) % VOCABULARY for k in range(1 + 3 * n)) for n in range(4)]
    async with house("shared_memory", blocks=64, backend=backend) as made:
        gateway = Gateway(made)
        heard = [
            gateway.start(made.decodes[0], made.prefills[0], work((f"r{n}", 1), prompt, 24))
            for n, prompt in enumerate(prompts)
        ]
        for one in heard:
            await one.ended.wait()
        assert [tuple(one.tokens) for one in heard] == [greedy(prompt, 24) for prompt in prompts]
        assert await made.empty() == []
        await gateway.close()


async def test_a_dropped_step_is_awaited_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else streams, heartbeats and handoffs would stand still for a whole step."""
    read = NativeBackend._collect
    failed = False
    waited_for_by: list[threading.Thread] = []

    def reading(self: NativeBackend, step: Any) -> Any:
        nonlocal failed
        if failed and not waited_for_by:
            waited_for_by.append(threading.current_thread())
        followed = len(self._ahead) > 1
        drawn = read(self, step)
        if followed and not failed:
            failed = True
            raise RuntimeError("the device gave nothing")
        return drawn

    monkeypatch.setattr(NativeBackend, "_collect", reading)
    async with house("shared_memory", blocks=24, backend="native") as made:
        gateway = Gateway(made)
        heard = gateway.start(made.decodes[0], made.prefills[0], work(("r", 1), (5, 9, 2), 40))
        await heard.ended.wait()
        assert tuple(heard.tokens) == greedy((5, 9, 2), 40)
        assert await made.empty() == []
        await gateway.close()
    (thread,) = waited_for_by
    assert thread is not threading.main_thread()


def test_may_launch_ahead_needs_a_spare_core_on_native_backends() -> None:
    fd = os.memfd_create("cores")
    ours, theirs = (SharedCores(fd, home=[core], cores=2) for core in range(2))
    cpu = CpuPolicy(MODELS["native"]().backend, 1, shared=ours)
    assert cpu.may_launch_ahead()
    theirs.claim()
    assert not cpu.may_launch_ahead()
    theirs.yield_()
    assert cpu.may_launch_ahead()
    assert not CpuPolicy(
        MODELS["native"]().backend, 1
    ).may_launch_ahead()  # no state says whether there is one
    assert CpuPolicy(MODELS["device"]().backend, 1).may_launch_ahead()
    os.close(fd)


def test_abort_reaches_a_row_in_every_step_in_flight() -> None:
    from diptych.worker_process.step_thread import StepThread

    thread: StepThread[object] = StepThread()
    one, other = object(), object()
    present: InFlight[object] = thread.begin([one, other])
    following = thread.begin([other])
    thread.abort(other)
    assert (present.abort.words.tolist(), following.abort.words.tolist()) == ([0, 1], [1])
    thread.end(present)
    assert (thread.writes(one), thread.writes(other), thread.busy) == (False, True, True)
    thread.end(following)
    assert not thread.busy
    thread.close()
