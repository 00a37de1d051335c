"""Guests come and go in the middle of a step: the same bits, and nobody waits for one that is not there."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.status import NativeError
from diptych.engine.batch import SequenceStep
from kernels.cpu import library as native
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of

SHAPE = shape_of(num_layers=4)
CORES = 3
OTHERS = [1, 2]


class Cores:
    """The states of a machine's cores; core 0 is the step's own."""

    def __init__(self) -> None:
        self.states = (ctypes.c_uint8 * CORES)()

    def all(self, state: int) -> None:
        for core in OTHERS:
            self.states[core] = state

    @contextmanager
    def taken_and_left(self, seed: int) -> Iterator[None]:
        """Owners that want their cores back, and leave them, at any moment."""
        over, chooser = threading.Event(), random.Random(seed)

        def own() -> None:
            while not over.wait(chooser.random() * 4e-4):
                self.states[chooser.choice(OTHERS)] = chooser.choice([native.CORE_FREE, native.CORE_OWNED])

        thread = threading.Thread(target=own)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def assisted(cores: Cores) -> NativeBackend:
    backend = NativeBackend(SHAPE, weights_of(SHAPE, torch.float32), torch.float32)
    backend.use_idle_cores(ctypes.addressof(cores.states), OTHERS)
    return backend


def steps(count: int) -> list[SequenceStep]:
    """A long prompt and a few short ones in one batch."""
    pool = Pool(layout_of(SHAPE, 16, torch.float32), 64)
    lengths = [count, 1, 7]
    return [pool.sequence(length).step(tokens_of(length)) for length in lengths]


@pytest.mark.parametrize("after", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("threads", [1, 2])
def test_coming_and_going_changes_no_bit(threads: int, after: float) -> None:
    cores, batch = Cores(), steps(200)
    backend = assisted(cores)
    backend.use_idle_cores_after(after)
    cores.all(native.CORE_OWNED)
    expected = backend.forward(batch, None)
    backend.set_threads(threads)
    with cores.taken_and_left(threads):
        for _ in range(30):
            assert torch.equal(backend.forward(batch, None), expected)


@contextmanager
def watched(cores: Cores) -> Iterator[set[int]]:
    """The states that cores of others are in meanwhile."""
    seen, over = set[int](), threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.update(cores.states[core] for core in OTHERS)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        yield seen
    finally:
        over.set()
        watching.join()


def test_guests_help_on_free_cores_and_leave_them_free() -> None:
    cores, batch = Cores(), steps(900)
    backend = assisted(cores)
    with watched(cores) as seen:
        for _ in range(20):
            backend.forward(batch, None)
    assert seen == {native.CORE_FREE, native.CORE_CLAIMED}
    assert list(cores.states) == [native.CORE_FREE] * CORES


def test_a_step_that_wants_no_help_gets_none() -> None:
    cores, batch = Cores(), steps(900)
    backend = assisted(cores)
    backend.use_idle_cores_after(1.0)
    with watched(cores) as seen:
        for _ in range(5):
            backend.forward(batch, None)
    assert seen == {native.CORE_FREE}


def test_nobody_comes_to_a_core_that_is_owned() -> None:
    cores, batch = Cores(), steps(200)
    backend = assisted(cores)
    cores.all(native.CORE_OWNED)
    for _ in range(20):
        backend.forward(batch, None)
        assert [cores.states[core] for core in OTHERS] == [native.CORE_OWNED] * 2


def test_teams_with_guests_begin_and_end() -> None:
    """No wake-up is lost, at whatever moment a model ends or is given other guests."""
    cores, batch = Cores(), steps(5)
    chooser, until = random.Random(3), time.monotonic() + 3
    with cores.taken_and_left(7):
        while time.monotonic() < until:
            backend = assisted(cores)
            for _ in range(chooser.randrange(4)):
                backend.forward(batch, None)
            if chooser.random() < 0.3:
                backend.use_idle_cores(ctypes.addressof(cores.states), chooser.choice([[], [2], OTHERS]))
                backend.forward(batch, None)


def test_a_negative_number_of_guests_is_refused() -> None:
    backend = NativeBackend(SHAPE, weights_of(SHAPE, torch.float32), torch.float32)
    library = native.load()
    none = (ctypes.c_int32 * 1)()
    assert library.diptych_set_guests(backend._model, None, none, -1) == native.INVALID
    with pytest.raises(NativeError, match="guests"):
        backend._check(native.INVALID)
