"""How the supervisor's tests start the small program."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from diptych.cli.child import ChildSpec, Slot

ROOT = Path(__file__).resolve().parents[3]


def program_spec(
    name: str, mode: str = "serve", *, role: str = "prefill", keep_port: bool = False
) -> ChildSpec:
    return ChildSpec(
        name=name,
        role=role,
        argv=(
            sys.executable,
            str(ROOT / "tests/diptych/cli/program.py"),
            mode,
            "--grpc-port",
            Slot("grpc_port"),
            "--death-fd",
            Slot("death_fd"),
            "--ready-fd",
            Slot("ready_fd"),
        ),
        env={"PYTHONPATH": str(ROOT)},
        values={"grpc_port": 0},
        keep=("grpc_port",) if keep_port else (),
    )


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which only its parent can remove, does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
