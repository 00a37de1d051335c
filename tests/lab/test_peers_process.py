"""Real processes: started, parked, woken, ended, and never left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.peers.process import RunningServer, StartFailed
from lab.peers.servers import Server

# A server with a child of its own, which only the group's signals reach.
SERVER = textwrap.dedent(
    """
    import http.server, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)


def script(text: str, *arguments: str, timeout_s: float = 20.0) -> Server:
    return Server(
        "scripted", "vllm", "bf16", (sys.executable, "-c", text, *arguments), start_timeout_s=timeout_s
    )


def test_starts_parks_wakes_and_ends_the_whole_group(tmp_path: Path) -> None:
    with RunningServer(script(SERVER, "{port}"), tmp_path) as running:
        pids = group(tmp_path)
        assert running.start_s > 0
        running.park()
        eventually(lambda: [state(pid) for pid in pids] == ["T", "T"])
        running.wake()
        eventually(lambda: "T" not in [state(pid) for pid in pids])
        urllib.request.urlopen(f"http://{running.address}/health", timeout=60).close()
        running.park()
    eventually(lambda: [state(pid) for pid in pids] == ["gone", "gone"])


def test_says_why_a_server_did_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(StartFailed, match=r"status 3\n.*no such model"),
        RunningServer(script("import sys; print('no such model'); sys.exit(3)"), tmp_path),
    ):
        pytest.fail("it did not start")


def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    silent = "import os, time; print('child', os.getpid(), flush=True); time.sleep(600)"
    with (
        pytest.raises(StartFailed, match="not ready in time"),
        RunningServer(script(silent, timeout_s=1.0), tmp_path),
    ):
        pytest.fail("it did not start")
    [pid] = children(tmp_path)
    assert state(pid) == "gone"


def test_a_parked_server_does_not_outlive_a_killed_benchmark(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from lab.peers.process import RunningServer
        from lab.peers.servers import Server
        server = Server("scripted", "vllm", "bf16", (sys.executable, "-c", {SERVER!r}, "{{port}}"))
        with RunningServer(server, Path({str(tmp_path)!r})) as running:
            running.park()
            print("parked", flush=True)
            time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == b"parked\n"
        pids = group(tmp_path)
        benchmark.send_signal(signal.SIGKILL)
    eventually(lambda: [state(pid) for pid in pids] == ["gone", "gone"])


def children(folder: Path) -> list[int]:
    lines = (folder / "scripted.log").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("child")]


def group(folder: Path) -> list[int]:
    """The server's child and the server, which leads the group."""
    [child] = children(folder)
    return [child, os.getpgid(child)]


def state(pid: int) -> str:
    """A letter of proc(5); a zombie, which only its parent can remove, is as good as gone."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "gone"
    return "gone" if letter == "Z" else letter


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
