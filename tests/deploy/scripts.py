"""Runs of the scripts of deploy/, and the commands that they say or give."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_PATH = "/usr/bin:/bin"


@dataclass(frozen=True)
class Run:
    """Exit status, what was written, and the commands."""

    status: int
    text: str
    commands: list[list[str]]


def dry_run(script: Path, *options: str) -> Run:
    """Run a script with --dry-run, without the programs that it calls on the path."""
    done = _run(script, ["--dry-run", *options], _PATH)
    return Run(
        done.returncode, done.stdout + done.stderr, [] if done.returncode else shlex_lines(done.stdout)
    )


def recorded_run(script: Path, programs: Path, record: Path, *options: str) -> Run:
    """Run a script with the programs of a folder, which write their commands to `record`."""
    done = _run(script, list(options), f"{programs}:{_PATH}")
    return Run(done.returncode, done.stdout + done.stderr, shlex_lines(record.read_text()))


def shlex_lines(text: str) -> list[list[str]]:
    """Read bash's quotes, $'…' with escapes among them: by bash."""
    shown = r"""while IFS= read -r line; do eval "words=($line)"; printf '%s\0' "${words[@]}" $'\1'; done"""
    done = subprocess.run(["bash", "-c", shown], input=text, capture_output=True, text=True, check=True)
    return [line.split("\0")[:-1] for line in done.stdout.split("\1\0")[:-1]]


def _run(script: Path, options: list[str], path: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={"PATH": path}
    )
