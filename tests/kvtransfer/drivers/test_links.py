"""Connections to a decode worker that accepts and never answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from diptych.runtime.rpc_streams.unix_stream import socket_name
from kvtransfer.drivers import links as peer_link
from kvtransfer.protocol.errors import HandoffDenied
from tests.kvtransfer.conftest import INCARNATION, pairs

ADDRESS = "127.0.0.1:9"


@pytest.fixture
def silent() -> Iterator[None]:
    """Accept as the kernel of a stopped process does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_name(ADDRESS))
        listener.listen(50)
        yield


@pytest.mark.usefixtures("silent")
async def test_failed_connect_denies_every_waiting_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0
    connect = peer_link.PeerLink.connect

    async def counted(*args: object) -> object:
        nonlocal tries
        tries += 1
        return await connect(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(peer_link.PeerLink, "connect", counted)
    async with pairs() as make:
        client = (await make("tcp")).prefill.client
        found = await asyncio.gather(
            *(client.peer(ADDRESS, INCARNATION) for _ in range(5)), return_exceptions=True
        )
        assert [type(one) for one in found] == [HandoffDenied] * 5
        assert len({str(one) for one in found}) == 1
        assert tries == 1
        with pytest.raises(HandoffDenied):
            await client.peer(ADDRESS, INCARNATION)
        assert tries == 2  # a later call tries again
