"""Cancelled prompts release their blocks, whenever the cancel comes."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.drivers.client import HandoffClient
from kvtransfer.drivers.peer import Peer
from prefill_worker.request import State
from tests.diptych.worker_process.both_workers import house
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_a_cancel_after_the_ask_takes_the_grant_back(transport, monkeypatch):
    """Whatever is awaited before the ask may end just then, and the task goes on."""
    linked = HandoffClient.peer

    async def unstoppable(client: HandoffClient, address: str, incarnation: int) -> Peer:
        linking = asyncio.ensure_future(linked(client, address, incarnation))
        while not linking.done() or not cancelled.is_set():
            try:
                await asyncio.wait((linking, asyncio.ensure_future(cancelled.wait())))
            except asyncio.CancelledError:
                cancelled.set()
        return linking.result()

    cancelled = asyncio.Event()
    monkeypatch.setattr(HandoffClient, "peer", unstoppable)
    async with house(transport) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        gateway.start(decode, prefill, work(("r", 1), (3, 1, 4, 1, 5), 4))
        await until(lambda: prefill.loop.requests[("r", 1)].state is State.ASKED)
        await asyncio.sleep(0.05)
        prefill.loop.requests.cancel(("r", 1))
        await until(lambda: bool(prefill.ended), 10)
        assert [how for _, how in prefill.ended] == ["cancelled"]
        assert prefill.leftovers() == []
        await gateway.close()
        assert await made.empty() == []
