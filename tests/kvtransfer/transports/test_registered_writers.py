"""Registered writers without sockets: what the death of a rank means for those that have not registered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.registered_writers import RegisteredWriters

WRITER = WriterId("w", 1)


class Process:
    """Process whose death the test reports."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.die: Callable[[], None] = lambda: None

    def kill(self) -> None: ...

    def watch(self, on_death: Callable[[], None]) -> None:
        self.die = on_death

    def close(self) -> None: ...


@pytest.mark.parametrize("taken_before", [True, False])
def test_rank_that_comes_after_the_death_of_its_group_does_not_register(taken_before: bool) -> None:
    dead: list[WriterId] = []
    writers = RegisteredWriters(dead.append)
    ranks = [Process(7), Process(8)]
    first, second = writers.admit(WRITER, [rank.pid for rank in ranks])
    writers.keep(writers.take(first, 7), ranks[0])
    if taken_before:
        writers.take(second, 8)
    ranks[0].die()
    assert dead == [WRITER]
    if taken_before:
        writers.keep(WRITER, ranks[1])
    else:
        with pytest.raises(TransportError):
            writers.take(second, 8)
    assert not writers.registered(WRITER)


@pytest.mark.parametrize("fenced", [True, False])
def test_rank_does_not_register_once_its_group_is_fenced(fenced: bool) -> None:
    writers = RegisteredWriters(lambda writer: None)
    first, second = writers.admit(WRITER, [7, 8])
    writers.keep(writers.take(first, 7), Process(7))
    if fenced:
        writers.fence(WRITER)
        with pytest.raises(TransportError):
            writers.take(second, 8)
    else:
        assert writers.take(second, 8) == WRITER
