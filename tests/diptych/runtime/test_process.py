"""Programs under run_program, as real processes."""

import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diptych.runtime import process

ROOT = Path(__file__).parents[3]

PROGRAM = """
import asyncio, gc, logging, sys
from diptych.runtime.settings import StartupError
from diptych.runtime.process import announce_ready, incarnation, run_program
from diptych.runtime.settings import ProgramSettings

settings = ProgramSettings.from_argv(sys.argv[2:])

async def main(stop):
    assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    assert incarnation() == incarnation() and 0 < incarnation() < 2**63
    if sys.argv[1] == "mistake":
        raise StartupError("no model at /nowhere")
    announce_ready(settings, {"grpc_port": 1, "http_port": 2})
    assert gc.get_freeze_count() > len(gc.get_objects()), "a full collection would stop everything"
    if sys.argv[1] == "raise":
        raise ValueError("first line\\nsecond line")
    await stop.wait()
    if sys.argv[1] == "serve":
        await asyncio.sleep(0.05)
    if sys.argv[1] == "stuck":
        await asyncio.sleep(60)
    return 7

sys.exit(run_program(main, settings))
"""


class Child:
    def __init__(self, mode: str, *flags: str, death_pipe: bool = False) -> None:
        ready_r, ready_w = os.pipe()
        passed = [ready_w]
        flags = (*flags, f"--ready-fd={ready_w}", "--worker-id=w1")
        self.death_w = None
        if death_pipe:
            death_r, self.death_w = os.pipe()
            passed.append(death_r)
            flags = (*flags, f"--death-fd={death_r}")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, mode, *flags], cwd=ROOT, pass_fds=passed, stderr=subprocess.PIPE
        )
        for fd in passed:
            os.close(fd)
        with os.fdopen(ready_r) as pipe:
            self.ready = pipe.read()  # to the end: the program closes its end after the line

    def finish(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr.decode()


def test_ready_line_then_a_signal_ends_it_with_mains_status() -> None:
    child = Child("serve")
    assert json.loads(child.ready) == {"grpc_port": 1, "http_port": 2, "worker_id": "w1"}
    assert child.ready.count("\n") == 1
    child.process.send_signal(signal.SIGTERM)
    code, stderr = child.finish()
    assert code == 7
    assert "diptych/w1" in stderr


def test_a_second_signal_does_not_wait() -> None:
    child = Child("stuck")
    child.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(0.5)
    child.process.send_signal(signal.SIGTERM)
    code, stderr = child.finish()
    assert code == 128 + signal.SIGTERM
    assert "second SIGTERM" in stderr


FIRST_OF_A_CONTAINER = """
import time
from diptych.runtime.process import exit_on_sigterm
exit_on_sigterm()
print("starting", flush=True)
time.sleep(60)
"""
AS_PID_1 = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def test_sigterm_ends_what_still_starts_also_as_the_first_process_of_a_container() -> None:
    """The kernel spares pid 1 signals that it has no handler for: it served, and was killed later."""
    try:
        subprocess.run([*AS_PID_1, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no pid namespaces for this user")
    command = [*AS_PID_1, sys.executable, "-c", FIRST_OF_A_CONTAINER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.parametrize("module", ["gateway", "prefill_worker", "decode_worker"])
def test_a_program_can_be_stopped_before_it_reads_its_settings(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told(Exception):
        pass

    def exit_on_sigterm() -> None:
        raise Told

    main = importlib.import_module(f"{module}.__main__")
    monkeypatch.setattr(main, "exit_on_sigterm", exit_on_sigterm)
    with pytest.raises(Told):
        main.main(["--no-such-flag"])


def test_two_signals_at_once_are_one() -> None:
    child = Child("serve")
    child.process.send_signal(signal.SIGINT)
    child.process.send_signal(signal.SIGTERM)
    code, stderr = child.finish()
    assert code == 7
    assert "second" not in stderr


def test_an_exception_is_one_line_of_log_and_status_1() -> None:
    code, stderr = Child("raise").finish()
    assert code == 1
    [line] = [line for line in stderr.splitlines() if "ValueError" in line]
    assert "second line" in line


def test_run_program_reports_a_startup_error_without_a_traceback() -> None:
    code, stderr = Child("mistake").finish()
    assert code == 1
    first, line = stderr.splitlines()
    assert re.search(r"configuration [0-9a-f]{12}$", first)
    assert line.endswith("cannot start: no model at /nowhere")


def test_the_end_of_the_death_pipe_ends_the_process() -> None:
    child = Child("stuck", death_pipe=True)
    assert child.process.poll() is None
    assert child.death_w is not None
    os.close(child.death_w)
    code, _ = child.finish()
    assert code == 1


def test_a_killed_parent_takes_its_child_along() -> None:
    """The pipe's write end stays open here, in the test: it is the kernel's signal that works."""
    death_r, death_w = os.pipe()
    parent_code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {PROGRAM!r}, 'stuck', '--death-fd={death_r}',"
        " '--ready-fd=1'], pass_fds=[1, " + str(death_r) + "])\n"
        "print(child.pid, flush=True)\nchild.wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code],
        cwd=ROOT,
        pass_fds=[death_r],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    with parent.stdout:
        child_pid = int(parent.stdout.readline())
        assert b"grpc_port" in parent.stdout.readline()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while _alive(child_pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.01)
    os.close(death_r)
    os.close(death_w)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_program_has_all_the_descriptors_that_it_may_have() -> None:
    code = (
        "import resource; from diptych.runtime.process import raise_descriptor_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512)); raise_descriptor_limit(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(512, 512)"


def test_the_collector_rests_while_modules_are_imported_and_goes_on_after_a_failure():
    def start() -> None:
        with process.importing():
            assert not gc.isenabled()
            importlib.import_module("diptych.no_such_module")

    with pytest.raises(ImportError):
        start()
    assert gc.isenabled()
