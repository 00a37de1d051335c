"""Control socket of `diptych up`, for `diptych restart` and `model`: named after the public port.

The Unix socket is abstract (Linux): it is no file, and is gone with the process. Every user of the machine
can connect: the kernel gives the user of the other end, and only the user who runs the system, or root, is
served. One line of
JSON goes in, such as the names of the processes to restart; lines of text come back, the last one "done" or
"failed: why".
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any

from diptych.runtime.peer_credentials import peer_credentials

_LINE_BYTES = 1 << 16
DONE = "done"
FAILED = "failed: "

Say = Callable[[str], None]
Restart = Callable[[Sequence[str], Say], Awaitable[None]]
Command = Callable[[Any, Say], Awaitable[None]]
"""Handler of a command: gets its value, and what takes the lines of the answer."""


class NoSystem(Exception):
    """No system with that port runs on this machine."""


def socket_name(grpc_port: int) -> str:
    """Return the socket's name of a system by its public port; the leading zero byte makes it abstract."""
    return f"\0diptych-up.{grpc_port}"


@asynccontextmanager
async def control_socket(
    grpc_port: int,
    restart: Restart,
    warn: Callable[[str], None],
    others: Mapping[str, Command] = MappingProxyType({}),
) -> AsyncIterator[None]:
    """Listen while the context lasts; one command at a time. `others` are the handlers of further ones.

    Where another system has the port, on another address of this machine, it warns and does without.
    """
    lock = asyncio.Lock()

    async def restart_named(names: Any, say: Say) -> None:
        await restart([str(name) for name in names], say)

    commands: Mapping[str, Command] = {"restart": restart_named, **others}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _may_command(writer.get_extra_info("socket")):
                await _command(reader, writer, commands, lock)
            else:
                writer.write(f"{FAILED}another user runs this system\n".encode())
        finally:
            writer.close()

    try:
        server = await asyncio.start_unix_server(serve, socket_name(grpc_port), limit=_LINE_BYTES)
    except OSError:
        warn(
            f"`diptych restart` is for another system with port {grpc_port} on this machine, not for this one"
        )
        yield
        return
    try:
        yield
    finally:
        server.close()


async def _command(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    commands: Mapping[str, Command],
    lock: asyncio.Lock,
) -> None:
    def say(text: str) -> None:
        writer.write(text.replace("\n", " ").encode() + b"\n")

    try:
        [(name, value)] = json.loads(await reader.readline()).items()
        command = commands[name]
    except (ValueError, KeyError, TypeError, AttributeError):
        say(f"{FAILED}this is no command")
        return
    if lock.locked():
        say(f"{FAILED}a restart is going on, or another command")
        return
    async with lock:
        try:
            await command(value, say)
        except Exception as error:  # whatever it is, the other end must learn of it
            say(f"{FAILED}{error or type(error).__name__}")
        else:
            say(DONE)


def _may_command(peer: socket.socket) -> bool:
    return peer_credentials(peer).uid in (0, os.getuid())


def ask_restart(grpc_port: int, names: Sequence[str], say: Callable[[str], None]) -> bool:
    """Ask for a restart and pass its lines to `say`. Returns whether it ended well. Raises NoSystem."""
    return ask_system(grpc_port, {"restart": list(names)}, say)


def ask_system(grpc_port: int, command: Mapping[str, object], say: Callable[[str], None]) -> bool:
    """Send a command and pass its lines to `say`. Returns whether it ended well. Raises NoSystem."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(socket_name(grpc_port))
        except OSError as error:
            raise NoSystem(f"no `diptych up` listens for port {grpc_port}: {error}") from None
        last = ""
        for last in _answers(connection, command):
            if last != DONE:
                say(last)
    if last != DONE and not last.startswith(FAILED):
        say(f"{FAILED}`diptych up` ended before it was done")
    return last == DONE


def _answers(connection: socket.socket, command: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of the answer, until the other end closes: with an error, if it did not read the
    command.
    """
    with suppress(OSError):
        connection.sendall(json.dumps(command).encode() + b"\n")
    with connection.makefile() as lines:
        while True:
            try:
                line = lines.readline()
            except OSError:
                return
            if not line:
                return
            yield line.rstrip("\n")
