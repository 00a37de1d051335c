"""Endpoints of KV events: a socket of this user, or a loopback port behind a password.

Events carry token ids, and so prompts. vLLM's form has no authentication; here the operator decides who gets
them: a Unix socket lies in a folder that only its owner may enter, and a port of this machine asks for a
password (ZeroMQ's PLAIN). Nothing is bound that other machines reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.runtime.bind_address import is_loopback
from diptych.runtime.settings import StartupError

USER = "diptych"
"""Name that goes with the password."""
_IPC, _TCP = "ipc://", "tcp://"


class UnsafeEndpoint(StartupError):
    """Folder or file that others may read."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a ZeroMQ socket: `folder` holds it, or `password_file` guards it."""

    address: str
    replay_address: str
    folder: Path | None = None
    password_file: Path | None = None


def parse_endpoint(text: str, rank: int = 0) -> Endpoint:
    """Read ipc://FILE, or tcp://HOST:PORT?password-file=FILE. Raises ValueError.

    Of a system's decode workers each has a `rank`: two are added to a port for each, since the next port is
    that for replays, and `_dpRANK` to a file, as vLLM names its data-parallel ranks.
    """
    if text.startswith(_IPC):
        path = Path(text.removeprefix(_IPC))
        if not path.is_absolute():
            raise ValueError("a socket of KV events is ipc:// and an absolute path")
        address = f"{text}_dp{rank}" if rank else text
        return Endpoint(address, f"{address}.replay", folder=path.parent)
    rest, _, query = text.removeprefix(_TCP).partition("?")
    host, colon, port = rest.rpartition(":")
    name, _, password_file = query.partition("=")
    if not text.startswith(_TCP) or not colon or not port.isascii() or not port.isdigit():
        raise ValueError("KV events are published at ipc://FILE or tcp://127.0.0.1:PORT?password-file=FILE")
    if not is_loopback(host.strip("[]")):
        raise ValueError(f"KV events carry prompts: {host!r} can be reached from other machines")
    if name != "password-file" or not password_file:
        raise ValueError("a port of KV events needs a password: tcp://127.0.0.1:PORT?password-file=FILE")
    first = int(port) + 2 * rank
    if not 0 < first < 65535:
        raise ValueError(f"{first} is no port with one after it")
    address, replay_address = (f"{_TCP}{host}:{number}" for number in (first, first + 1))
    return Endpoint(address, replay_address, password_file=Path(password_file))


def prepare(endpoint: Endpoint) -> str | None:
    """Make the folder of a socket, or return the password of a port. Raises UnsafeEndpoint and OSError."""
    if endpoint.folder is not None:
        endpoint.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(endpoint.folder)
    if endpoint.password_file is None:
        return None
    _require_own(endpoint.password_file)
    password = endpoint.password_file.read_text().strip()
    if not password:
        raise UnsafeEndpoint(f"--kv-events: {endpoint.password_file} is empty")
    return password


def _require_own(path: Path) -> None:
    if path.stat().st_mode & 0o077:
        raise UnsafeEndpoint(f"--kv-events: others than its owner may use {path}; chmod go= it")
