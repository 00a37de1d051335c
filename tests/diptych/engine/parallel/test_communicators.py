"""Every communicator gives every rank the numbers of all, between real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
import torch

from diptych.engine.parallel import shared_memory_communicator
from diptych.engine.parallel.communicator import Alone, GroupBroken
from diptych.engine.parallel.shared_memory_communicator import SharedMemoryCommunicator, exchange_file
from tests.diptych.engine.parallel.exchange_process import SLOT_BYTES, exchange, send_to_each

PROCESS = "tests.diptych.engine.parallel.exchange_process"


def start(kind: str, ranks: int, at: int, pass_fds: Sequence[int]) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(
            [sys.executable, "-m", PROCESS, kind, str(rank), str(ranks), str(at)], pass_fds=pass_fds
        )
        for rank in range(ranks)
    ]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("kind", ["shared_memory", pytest.param("gloo", marks=pytest.mark.full)])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_every_rank_gets_the_numbers_of_all(kind: str, ranks: int) -> None:
    fd = exchange_file(ranks, SLOT_BYTES)
    at = fd if kind == "shared_memory" else free_port()
    try:
        processes = start(kind, ranks, at, [fd])
        assert [process.wait(120) for process in processes] == [0] * ranks
    finally:
        os.close(fd)


def test_one_rank_gets_its_own_numbers() -> None:
    exchange(Alone())
    send_to_each(Alone())


def test_counters_wrap() -> None:
    """After 2 ** 32 exchanges the words begin again at 0."""
    fd = exchange_file(2, SLOT_BYTES)
    ends = [SharedMemoryCommunicator(fd, rank, 2, SLOT_BYTES) for rank in range(2)]
    for end in ends:
        end._exchanges = (1 << 32) - 7
        end._counters[end.rank] = (1 << 32) - 7
    threads = [threading.Thread(target=exchange, args=(end, 20)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert [int(word) for word in ends[0]._counters] == [end._exchanges % (1 << 32) for end in ends]
    assert ends[0]._exchanges > 1 << 32
    os.close(fd)


def test_a_rank_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_communicator, "_SLEEPS", 1)
    fd = exchange_file(2, SLOT_BYTES)
    with pytest.raises(GroupBroken, match="rank 1 did not answer"):
        SharedMemoryCommunicator(fd, 0, 2, SLOT_BYTES).all_gather(torch.zeros(3))
    os.close(fd)
