"""The socket by which `diptych restart` finds a system."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO

import pytest

from diptych.cli.admin_commands import restart_processes
from diptych.cli.control import ask_restart, control_socket, socket_name


async def test_control_socket_warns_when_its_name_is_taken() -> None:
    asked: list[Sequence[str]] = []
    warnings: list[str] = []

    async def restart(names: Sequence[str], say: Callable[[str], None]) -> None:
        asked.append(names)

    async def never(names: Sequence[str], say: Callable[[str], None]) -> None:
        raise AssertionError("the first one has the name")

    async with control_socket(47, restart, warnings.append):
        assert warnings == []
        async with control_socket(47, never, warnings.append):
            assert await asyncio.to_thread(ask_restart, 47, ["decode-0"], print)
        assert len(warnings) == 1
        assert "47" in warnings[0]
    assert asked == [["decode-0"]]


async def test_ask_restart_reports_that_up_ended_meanwhile() -> None:
    begun = asyncio.Event()
    said: list[str] = []

    async def restart(names: Sequence[str], say: Callable[[str], None]) -> None:
        say("decode-0 restarted in 1.0 s")
        begun.set()
        await asyncio.Event().wait()

    async def up() -> None:
        async with control_socket(48, restart, said.append):
            await asyncio.Event().wait()

    running = asyncio.create_task(up())
    await asyncio.sleep(0)
    asking = asyncio.create_task(asyncio.to_thread(ask_restart, 48, [], said.append))
    await begun.wait()
    for task in asyncio.all_tasks() - {asyncio.current_task(), asking}:
        task.cancel()  # as the loop's end does
    assert not await asking
    await asyncio.wait([running])
    assert said == ["decode-0 restarted in 1.0 s", "failed: `diptych up` ended before it was done"]


async def test_control_socket_refuses_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    async def restart(names: Sequence[str], say: Callable[[str], None]) -> None:
        raise AssertionError

    monkeypatch.setattr("diptych.cli.control._may_command", lambda peer: False)
    async with control_socket(50, restart, said.append):
        for _ in range(5):  # whether the command was read when the connection ends is chance
            assert not await asyncio.to_thread(ask_restart, 50, [], said.append)
    assert set(said) == {"failed: another user runs this system"}


def test_ask_restart_survives_an_end_before_the_command_is_read() -> None:
    said: list[str] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_name(51))
        listener.listen()
        asking = threading.Thread(target=ask_restart, args=(51, [], said.append))
        asking.start()
        connection, _ = listener.accept()
        connection.recv(1, socket.MSG_PEEK)
        connection.close()
        asking.join(10)
    assert said == ["failed: `diptych up` ended before it was done"]


def test_ask_restart_tells_a_closed_output_from_a_missing_system() -> None:
    async def listen() -> None:
        async def restart(names: Sequence[str], say: Callable[[str], None]) -> None:
            say("decode-0 restarted in 1.0 s")

        async with control_socket(49, restart, print):
            await asyncio.to_thread(partial(restart_processes, 49, []))

    with pytest.raises(BrokenPipeError), redirect_stdout(Gone()):
        asyncio.run(listen())


class Gone(StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
