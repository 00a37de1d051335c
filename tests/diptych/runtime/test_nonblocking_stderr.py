"""A reader that does not read holds nobody up."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from diptych.runtime.nonblocking_stderr import NonblockingStream

LINE = "x" * 999 + "\n"
LOST = "({} writes had no room in time, and are lost)\n"
NOTICE = re.compile(r"\((\d+) writes had no room in time, and are lost\)")


@pytest.fixture(params=["pipe", "terminal", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, TextIO]]:
    """Where to read, and the stream to write to."""
    match request.param:
        case "pipe":
            reading, writing = os.pipe()
        case "terminal":
            reading, writing = pty.openpty()
        case _:
            one, other = socket.socketpair()
            reading, writing = one.detach(), other.detach()
    with os.fdopen(writing, "w", errors="backslashreplace") as stream:
        yield reading, stream
        os.close(reading)


def read(descriptor: int) -> str:
    """All that is there."""
    os.set_blocking(descriptor, False)
    came = b""
    while True:
        try:
            came += os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return came.decode().replace("\r\n", "\n")  # as terminals write it


def test_what_is_not_read_is_lost_and_counted(ends: tuple[int, TextIO]) -> None:
    reading, stream = ends
    patient = NonblockingStream(stream)
    for _ in range(2000):
        assert patient.write(LINE) == len(LINE)
    came = read(reading)
    patient.write("after\n")
    *lines, after = (came + read(reading)).splitlines()
    # A terminal may find room in between, and then says what was lost until there.
    lost = [int(said[1]) for line in lines if (said := NOTICE.fullmatch(line))]
    cut = [line for line in lines if not NOTICE.fullmatch(line) and line != LINE.strip()]
    assert lost
    # A line that lacks nothing but its end is a lost write, too.
    assert 0 <= lines.count(LINE.strip()) + sum(lost) - 2000 <= len(lost)
    assert all(LINE.startswith(line) or line.startswith("(") for line in cut)
    assert after == "after"
    patient.write("more\n")
    assert read(reading) == "more\n"


def test_others_with_the_same_end_may_still_wait(ends: tuple[int, TextIO]) -> None:
    _, stream = ends
    NonblockingStream(stream).write(LINE)
    assert os.get_blocking(stream.fileno())


def test_a_reader_that_is_gone_is_an_error() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        patient = NonblockingStream(stream)
        os.close(reading)
        with pytest.raises(BrokenPipeError):
            patient.write("x")


def test_what_is_no_pipe_takes_everything(tmp_path: os.PathLike[str]) -> None:
    memory = io.StringIO()
    patient = NonblockingStream(memory)
    patient.write("é" + LINE * 1000)
    assert memory.getvalue() == "é" + LINE * 1000
    assert not patient.isatty()
    path = os.path.join(tmp_path, "log")
    with open(path, "w", encoding="utf-8") as file:
        file.write("before\n")
        file.flush()
        NonblockingStream(file).write("é" + LINE * 1000)
    with open(path, encoding="utf-8") as file:
        assert file.read() == "before\né" + LINE * 1000


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_was_full_takes_what_comes_after(
    why: int, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room, write = 0, os.write

    def write_where_there_is_room(descriptor: int, data: bytes) -> int:
        nonlocal room
        taken = write(descriptor, data[:room])
        room -= taken
        if not taken:
            raise OSError(why, os.strerror(why))
        return taken

    monkeypatch.setattr("diptych.runtime.nonblocking_stderr.os.write", write_where_there_is_room)
    path = os.path.join(tmp_path, "log")
    with open(path, "w", encoding="utf-8") as file:
        patient = NonblockingStream(file)
        room = 5
        for line in ("one\n", "two\n", "three\n"):
            assert patient.write(line) == len(line)
        room = 1000
        patient.write("after\n")
    with open(path, encoding="utf-8") as file:
        assert file.read() == "one\nt\n" + LOST.format(2) + "after\n"


def test_a_device_that_is_full_is_no_error() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        NonblockingStream(full).write(LINE)


def test_a_program_without_standard_error_runs() -> None:
    code = (
        "import logging, sys; from diptych.cli.console import NoteConsole; "
        "from diptych.runtime.nonblocking_stderr import NonblockingStream; assert sys.stderr is None; "
        "logging.basicConfig(handlers=[logging.StreamHandler(NonblockingStream(sys.stderr))]); "
        "logging.error('x'); NoteConsole().print('x'); print('fine')"
    )
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" 2>&-', sys.executable, code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "fine\n"
