"""The holder of packed weights: one worker packs, the others get the whole file, whoever dies meanwhile."""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from diptych.runtime.weight_store import protocol
from diptych.runtime.weight_store.client import HostWeights
from diptych.runtime.weight_store.holder import WeightHolder

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
SOON_S = 60.0


def file_of(content: bytes, *, sealed: bool = True) -> int:
    file = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(file, content)
    if sealed:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file


def new_key() -> str:
    return secrets.token_hex(32)


def content_of(file: int | None) -> bytes:
    assert file is not None, "the worker was told to pack"
    try:
        return os.pread(file, 100, 0)
    finally:
        os.close(file)


@pytest.fixture(params=["supervisor", "workers alone"])
def name(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Name of a holder; None where the workers have to find each other."""
    if request.param == "workers alone":
        yield None
        return
    holder = WeightHolder(f"diptych-test-{secrets.token_hex(8)}")
    yield holder.name
    holder.close()


Join = Callable[[], HostWeights]


@pytest.fixture
def workers(name: str | None) -> Iterator[Join]:
    """Maker of workers, which end with the test."""
    yield from _workers(name)


def _workers(name: str | None) -> Iterator[Join]:
    made: list[HostWeights] = []

    def join() -> HostWeights:
        made.append(HostWeights(name))
        return made[-1]

    yield join
    for one in made:
        one.close()


def publish(weights: HostWeights, key: str, content: bytes) -> None:
    assert weights.obtain(key) is None
    file = file_of(content)
    weights.publish(key, file)
    os.close(file)


def test_one_worker_packs_and_the_others_get_its_file(workers: Join) -> None:
    first, second, key = workers(), workers(), new_key()
    assert first.obtain(key) is None
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.append(content_of(second.obtain(key))))
    waiter.start()
    time.sleep(0.05)
    assert not found
    file = file_of(b"packed")
    first.publish(key, file)
    os.close(file)
    waiter.join(SOON_S)
    assert found == [b"packed"]
    assert content_of(workers().obtain(key)) == b"packed"


def test_keys_are_apart(workers: Join) -> None:
    weights = workers()
    one = new_key()
    publish(weights, one, b"one")
    other = new_key()
    assert weights.obtain(other) is None
    assert content_of(workers().obtain(one)) == b"one"


def test_a_packer_that_dies_hands_its_turn_to_the_next(workers: Join) -> None:
    first, second, key = workers(), workers(), new_key()
    assert first.obtain(key) is None
    found: list[int | None] = []
    waiter = threading.Thread(target=lambda: found.append(second.obtain(key)))
    waiter.start()
    time.sleep(0.05)
    first.give_up(key)  # closes the connection, as the end of a process does
    waiter.join(SOON_S)
    assert found == [None]
    file = file_of(b"of the second")
    second.publish(key, file)
    os.close(file)
    assert content_of(workers().obtain(key)) == b"of the second"


def test_a_file_that_can_still_change_is_refused(workers: Join) -> None:
    weights, key = workers(), new_key()
    assert weights.obtain(key) is None
    half = file_of(b"half", sealed=False)
    with pytest.raises(OSError, match="took no file"):
        weights.publish(key, half)
    os.close(half)
    weights.give_up(key)
    assert workers().obtain(key) is None


def test_only_the_packer_publishes(workers: Join) -> None:
    first, second, key = workers(), workers(), new_key()
    assert first.obtain(key) is None
    connection = second._join(key)
    connection.send(protocol.DONE)
    assert connection.recv(100) == protocol.REFUSED
    connection.close()


def test_a_file_outlives_its_workers_for_a_while() -> None:
    holder = WeightHolder(f"diptych-test-{secrets.token_hex(8)}", linger_s=SOON_S)
    weights, key = HostWeights(holder.name), new_key()
    assert weights.obtain(key) is None
    connection, file = weights._packing[key], file_of(b"packed")
    weights.publish(key, file)
    os.close(file)
    connection.shutdown(2)  # the only lease ends
    assert content_of(HostWeights(holder.name).obtain(key)) == b"packed"
    holder.close()


def test_a_file_that_nobody_uses_is_forgotten() -> None:
    holder = WeightHolder(f"diptych-test-{secrets.token_hex(8)}", linger_s=0.0)
    weights, key = HostWeights(holder.name), new_key()
    assert weights.obtain(key) is None
    connection, file = weights._packing[key], file_of(b"packed")
    weights.publish(key, file)
    os.close(file)
    connection.shutdown(2)
    end = time.monotonic() + SOON_S
    while (found := (last := HostWeights(holder.name)).obtain(key)) is not None:
        os.close(found)
        assert time.monotonic() < end
        time.sleep(0.01)
    last.close()
    holder.close()


def test_another_worker_takes_the_place_of_a_holder_that_died() -> None:
    first, second, key = HostWeights(), HostWeights(), new_key()
    publish(first, key, b"packed")
    assert content_of(second.obtain(key)) == b"packed"
    first.close()
    third, end = HostWeights(), time.monotonic() + SOON_S
    while (found := third.obtain(key)) is None:  # it asked before the second one had offered its file
        third.give_up(key)
        assert time.monotonic() < end
        time.sleep(0.02)
    assert content_of(found) == b"packed"
    second.close()
    third.close()


PACKER = """
import fcntl, os, sys, time
from diptych.runtime.weight_store.client import HostWeights
weights = HostWeights(sys.argv[1])
assert weights.obtain(sys.argv[2]) is None
file = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
os.write(file, b"packed by a process")
if sys.argv[3] == "whole":
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    weights.publish(sys.argv[2], file)
print("there", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["half", "whole"])
def test_a_packer_that_is_killed(state: str) -> None:
    """A whole file outlives the process that made it; of half a file nothing is left, and another packs."""
    holder = WeightHolder(f"diptych-test-{secrets.token_hex(8)}")
    key, after = new_key(), HostWeights(holder.name)
    packer = subprocess.Popen(
        [sys.executable, "-c", PACKER, holder.name, key, state], stdout=subprocess.PIPE, text=True
    )
    with packer:
        assert packer.stdout is not None
        assert packer.stdout.readline() == "there\n"
        packer.kill()
    file = after.obtain(key)
    if state == "whole":
        assert content_of(file) == b"packed by a process"
    else:
        assert file is None
    after.close()
    holder.close()


def test_a_supervisor_that_is_gone_is_an_error() -> None:
    with pytest.raises(ConnectionRefusedError):
        HostWeights(f"diptych-test-{secrets.token_hex(8)}").obtain(new_key())
