import os
import subprocess
import sys

from diptych.cli.valkey import PARENT_DEATH


def start(death_fd: int, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", str(PARENT_DEATH), str(death_fd), *command],
        pass_fds=(death_fd,),
        stdout=subprocess.PIPE,
    )


def test_parent_death_executes_the_program() -> None:
    read, write = os.pipe()
    try:
        with start(read, "/bin/sh", "-c", "echo $$; exit 7") as process:
            out, _ = process.communicate(timeout=60)
            assert int(out) == process.pid
            assert process.returncode == 7
    finally:
        os.close(read)
        os.close(write)


def test_parent_death_starts_nothing_when_the_parent_is_gone() -> None:
    read, write = os.pipe()
    os.close(write)  # what the death of the parent does
    try:
        with start(read, "/bin/sh", "-c", "echo started") as process:
            out, _ = process.communicate(timeout=60)
            assert out == b""
            assert process.returncode == 1
    finally:
        os.close(read)
