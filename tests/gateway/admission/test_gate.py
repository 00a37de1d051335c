"""Callbacks of the admission gate."""

from __future__ import annotations

from functools import partial

from gateway.admission.gate import AdmissionGate
from gateway.admission.queue import AdmissionQueue
from gateway.admission.ticket import Ticket

REQUESTS = 2000
"""More than Python's stack has room for, were each admitted within the callback of the one before."""


def test_each_stall_admits_the_next_request() -> None:
    gate = AdmissionGate(AdmissionQueue(REQUESTS, 10_000_000), lambda: 0.0)
    tickets: list[Ticket] = []
    admitted: list[int] = []

    def stall(number: int, choices: tuple[int, ...]) -> None:
        assert choices == (0,)
        admitted.append(number)
        if number < len(tickets):
            gate.set_stalled(tickets[number], True)

    for number in range(REQUESTS):
        tickets.append(
            gate.enter(2000, max_tokens=1, priority=0, time_left_s=None, on_admitted=partial(stall, number))
        )
    for ticket in tickets[:2]:  # admitted before they had a ticket
        gate.set_stalled(ticket, True)
    assert admitted == list(range(REQUESTS))
    gate.queue.invariants()
