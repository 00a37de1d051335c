"""`python -m lab.request_path`: list the files that one chat request over gRPC runs through.

A `sitecustomize` module puts a recorder into every process: it notes each Python function that is called.
The system starts and answers once, so that nothing is counted that only a first request needs. Then the
recorders note what runs while there is no request (heartbeats, publishing), then what runs with one.
A file counts when one of its functions runs for the request and does not run without it; so do all lines of
that file, for a reader opens it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych.client import Client, chat
from diptych.runtime.python_module import module_command

ROOT = Path(__file__).parents[1]
START_S, SETTLE_S, IDLE_S, STOP_S = 180.0, 1.0, 5.0, 30.0

RECORDER = r"""
import os, sys, threading, time

FOLDER = os.environ["REQUEST_PATH_FOLDER"]
seen = set()


def profile(frame, event, argument):
    seen.add(frame.f_code)


def wait_for(phase):
    while not os.path.exists(f"{FOLDER}/{phase}"):
        time.sleep(0.02)


def watch():
    wait_for("idle")
    seen.clear()
    wait_for("request")
    without = set(seen)
    seen.clear()
    wait_for("end")
    found = {f"{one.co_filename}\t{one.co_qualname}" for one in list(seen) if one not in without}
    with open(f"{FOLDER}/{os.getpid()}.seen", "w") as out:
        print(" ".join(sys.orig_argv), *sorted(found), sep="\n", file=out)


threading.setprofile(profile)
threading.Thread(target=watch, daemon=True).start()
sys.setprofile(profile)
"""
PROGRAMS = ("gateway", "prefill_worker", "decode_worker")
PACKAGES = (*PROGRAMS, "diptych", "kvtransfer", "kernels")


def record_request(root: Path) -> dict[str, dict[str, list[str]]]:
    """Return, by program and by file under `root`, the functions that one chat request runs through."""
    with tempfile.TemporaryDirectory(prefix="diptych-path-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(RECORDER)
        with _system(folder, root) as address, Client(address) as client:
            question = chat("What is the capital of France?")
            client.generate(question, max_tokens=16)
            time.sleep(SETTLE_S)
            (folder / "idle").touch()
            time.sleep(IDLE_S)
            (folder / "request").touch()
            time.sleep(SETTLE_S)
            list(client.stream(question, max_tokens=16))
            (folder / "end").touch()
            time.sleep(SETTLE_S)
        found: dict[str, dict[str, list[str]]] = {program: {} for program in PROGRAMS}
        for record in folder.glob("*.seen"):
            command, *calls = record.read_text().splitlines()
            program = next((one for one in PROGRAMS if one in command.split()), None)
            if program is not None:
                for file, function in _ours(calls, root):
                    found[program].setdefault(file, []).append(function)
        return found


def _ours(calls: list[str], root: Path) -> Iterator[tuple[str, str]]:
    """Yield file and function of the calls into this repository's own, not generated, modules."""
    for call in calls:
        file, _, function = call.partition("\t")
        if file.startswith(f"{root}/"):
            path = Path(file).relative_to(root)
            if path.parts[0] in PACKAGES and "_pb2" not in path.name:
                yield str(path), function


@contextmanager
def _system(folder: Path, root: Path) -> Iterator[str]:
    ready = folder / "ready.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(root))),
        "REQUEST_PATH_FOLDER": str(folder),
    }
    command = [*module_command("diptych"), "up", "--ready-file", str(ready), "--log-level", "error"]
    command += ["--grpc-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, env=environment, cwd=folder) as process:
        try:
            deadline = time.monotonic() + START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"diptych up does not serve; its status is {process.returncode}")
                time.sleep(0.1)
            yield f"127.0.0.1:{json.loads(ready.read_text())['gateway']['grpc_port']}"
        finally:
            process.terminate()
            process.wait(STOP_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.request_path", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every file with its lines, by program")
    parser.add_argument("--functions", action="store_true", help="print the functions that ran, too")
    arguments = parser.parse_args()
    found = record_request(ROOT)
    lines = {name: (ROOT / name).read_text().count("\n") for files in found.values() for name in files}
    for program, files in found.items():
        print(f"{program}: {len(files)} files, {sum(lines[one] for one in files)} lines")
        for one in sorted(files) if arguments.list or arguments.functions else ():
            print(f"  {lines[one]:4} {one}")
            if arguments.functions:
                print(*(f"         {function}" for function in files[one]), sep="\n")
    print(f"together: {len(lines)} files, {sum(lines.values())} lines")


if __name__ == "__main__":
    main()
