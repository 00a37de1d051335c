"""End of the push queue."""

from __future__ import annotations

import asyncio

import pytest

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.drivers.push_queue import PushQueue
from kvtransfer.protocol.lease import TransferProgress
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.base import Run, StillGranted
from tests.kvtransfer.conftest import LAYOUT, until

REF = GrantRef(("r", 1), 0, 1)


class SlowChannel:
    """Channel whose started copies cannot be cancelled."""

    sent = acknowledged = 0
    broken = closed = False

    def __init__(self) -> None:
        self.copied = asyncio.Event()

    async def send(self, run: Run, wanted: StillGranted) -> list[bytes] | None:
        self.sent += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await self.copied.wait()
            raise
        return None

    def close(self) -> None:
        self.closed = True


async def test_close_lets_a_cancelled_caller_go() -> None:
    """Else a cancelled request would ask for blocks, and hold them."""
    channel = SlowChannel()
    progress = TransferProgress(0.0, 1.0, 10.0)
    queue = PushQueue(channel, lambda ref: True, lambda *sent: None, lambda: None, progress)
    queue.put(Run(REF, 0, KVMemory(LAYOUT, 1), [0], [0], None))
    await until(lambda: channel.sent == 1)
    asking = asyncio.create_task(queue.close())
    await asyncio.sleep(0.01)
    asking.cancel()
    asyncio.get_running_loop().call_later(0.01, channel.copied.set)
    with pytest.raises(asyncio.CancelledError):
        await asking
    await queue.close()
    assert channel.closed
