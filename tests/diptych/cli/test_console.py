import subprocess
import sys
from io import StringIO

from rich.console import Console

from diptych.cli.console import Progress
from diptych.cli.process_events import Ended, Event, Loading, Serving, Stale, Stopping, Wrote
from tests.diptych.cli.specs import ROOT

EVENTS: tuple[Event, ...] = (
    Loading("decode-0"),
    Wrote("decode-0", "a [bold]line[/] in brackets"),
    Serving("decode-0", 1.25),
    Ended("decode-0", "ended: killed by SIGKILL", 0.2),
    Ended("decode-0", "ended before it was ready (status 1)", 0.4),
    Loading("decode-0"),
    Stopping(0, 8.0),
    Stopping(1, 8.0),
    Stopping(None, 8.0),
    Stale("/tmp/[gone]/ready.json", "No such file or directory"),
)


def shown(*, lines: bool, terminal: bool = False) -> str:
    out = StringIO()
    progress = Progress(Console(file=out, width=100, force_terminal=terminal), lines=lines)
    for event in EVENTS:
        progress(event)
    progress.close()
    return out.getvalue()


def test_progress_prints_a_line_for_each_event() -> None:
    assert shown(lines=True).splitlines() == [
        "  decode-0 │ a [bold]line[/] in brackets",
        "● decode-0 is ready (1.2 s)",
        "● decode-0 ended: killed by SIGKILL; starts again in 0.2 s",
        "● decode-0 ended before it was ready (status 1); starts again in 0.4 s",
        "stopping: 1 request may finish for 8 s; Ctrl-C again does not wait",
        "stopping: what runs may finish for 8 s; Ctrl-C again does not wait",
        "● --ready-file: cannot change /tmp/[gone]/ready.json: No such file or directory",
    ]


def test_progress_prints_output_of_processes_only_with_lines() -> None:
    assert "brackets" not in shown(lines=False)


def test_progress_shows_what_is_loading_on_a_terminal() -> None:
    assert "loading decode-0" in shown(lines=False, terminal=True)


READER_LEAVES = """
import sys
from diptych.cli.console import NoteConsole, Progress
from diptych.cli.process_events import Wrote

progress = Progress(NoteConsole(), lines=True)
progress(Wrote("decode-0", "first"))
sys.stdin.readline()
for _ in range(3):
    progress(Wrote("decode-0", "unheard"))
progress.close()
print("still here")
"""


def test_progress_survives_a_closed_terminal() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", READER_LEAVES],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdin, process.stdout:
        assert process.stderr.readline()
        process.stderr.close()
        process.stdin.write(b"go on\n")
        process.stdin.flush()
        assert process.stdout.read() == b"still here\n"
