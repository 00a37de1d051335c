import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
import redis

from diptych.cli.process_events import Event, Serving
from diptych.cli.restart_policy import RestartPolicy
from diptych.cli.supervisor import Supervisor
from diptych.cli.valkey import start_valkey


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_valkey_wants_its_password_and_restarts_at_the_same_address() -> None:
    served = asyncio.Queue[str]()

    def observe(event: Event) -> None:
        if isinstance(event, Serving):
            served.put_nowait(event.name)

    supervisor = Supervisor(observe, policy=RestartPolicy(first_s=0.05))
    address = await start_valkey(supervisor)
    await served.get()
    try:
        await asyncio.to_thread(_write_and_read, address.url)
        [server] = supervisor.running()
        assert server.pid is not None
        assert address.password not in command_line(server.pid)
        assert address.password not in repr(address)

        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await served.get()
        await asyncio.to_thread(_write_and_read, address.url)
    finally:
        await supervisor.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", address.port), timeout=1).close()


def _write_and_read(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.set("name", "value")
        assert client.get("name") == b"value"
    with (
        redis.Redis.from_url(url.replace("redis://:", "redis://:wrong")) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.get("name")
