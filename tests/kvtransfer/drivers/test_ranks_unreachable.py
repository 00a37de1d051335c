"""Ranks that cannot reach one another: blocks go whole, through rank 0, which has all of them gathered."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.transports.tcp import TcpChannel
from kvtransfer.transports.tcp_by_rank import ByRankChannel
from tests.kvtransfer.conftest import LAYOUT, fill, pattern, read_whole, sampled, until


@pytest.mark.parametrize("reached", [True, False])
async def test_a_handoff_goes_whole_where_a_rank_is_not_reached(make_pair, times, reached, caplog):
    pair = await make_pair("2 ranks to 3")
    (receiver,) = pair.decode.server._handshake.transports
    if not reached:
        receiver._endpoints[1] = "127.0.0.1:1"  # where nothing listens
    granted = await pair.grant("r", 10)
    peer = await pair.peer()
    fill(granted, 10, 3)
    assert await peer.commit(granted, 10, sampled(1), times)
    await until(lambda: bool(pair.decode.ready))
    assert isinstance(peer._copying.channel, ByRankChannel if reached else TcpChannel)
    assert ("go whole: no shares reach the decode worker" in caplog.text) is not reached
    blocks = pair.decode.ready[0].block_ids
    assert len(blocks) == LAYOUT.blocks_for(10)
    for place, block in enumerate(blocks):
        assert torch.equal(read_whole(pair.decode.memory.memory, block), pattern(3, place))
