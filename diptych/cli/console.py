"""Display of the processes: which are loading and for how long, which serve, which ended and why."""

import contextlib
import sys
import time
from typing import IO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.text import Text

from diptych.cli.process_events import (
    ChangedRole,
    Ended,
    Event,
    Loading,
    Removed,
    Replaced,
    Serving,
    Stale,
    Stopping,
    Wrote,
)
from diptych.runtime.nonblocking_stderr import NonblockingStream


class NoteConsole(Console):
    """Console on standard error.

    Without a reader it is quiet, where rich's own would end the process. It never waits: a supervisor has to
    handle signals, and to read the output of its processes.
    """

    def __init__(self) -> None:
        super().__init__(file=cast("IO[str]", NonblockingStream(sys.stderr)))

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """Display of events; on a terminal a line below them moves while something is loading.

    `lines`: whether to show what the processes write.
    """

    def __init__(self, console: Console, *, lines: bool) -> None:
        self._console = console
        self._lines = lines
        self._loading: dict[str, float] = {}
        self._live: Live | None = None
        self._gone = False

    def __call__(self, event: Event) -> None:
        if self._gone:
            return
        try:
            self._print(event)
            self._show()
        except OSError:
            self._gone = True  # the terminal was closed; the processes are none of its business

    def _print(self, event: Event) -> None:
        match event:
            case Loading(name):
                self._loading[name] = time.monotonic()
            case Serving(name, seconds):
                self._loading.pop(name, None)
                self._say(f"[green]●[/] {name} is ready [dim]({seconds:.1f} s)[/]")
            case Ended(name, reason, restart_in_s):
                self._loading.pop(name, None)
                self._say(f"[red]●[/] {name} {reason}; starts again in {restart_in_s:.1f} s")
            case ChangedRole(name, now, role):
                self._say(f"[green]●[/] {name} ended to be a {role} worker, {now}")
            case Replaced(name):
                self._say(f"[green]●[/] {name} has a successor; the old one finishes what it has")
            case Removed(name):
                self._say(f"[green]●[/] {name} ended: it is not needed any more")
            case Stopping(requests, grace_s) if requests != 0:
                what = {None: "what runs", 1: "1 request"}.get(requests, f"{requests} requests")
                self._say(f"stopping: {what} may finish for {grace_s:.0f} s; Ctrl-C again does not wait")
            case Stopping():
                pass
            case Stale(path, reason):
                self._say(f"[yellow]●[/] --ready-file: cannot change {escape(path)}: {escape(reason)}")
            case Wrote("valkey", _):
                pass  # advice about the machine's kernel settings; its last lines are in ChildFailed
            case Wrote(name, line) if self._lines:
                self._console.print(Text.assemble((f"{name:>10} │ ", "dim"), line), soft_wrap=True)
            case Wrote():
                pass

    def close(self) -> None:
        """Remove the moving line."""
        self._loading.clear()
        with contextlib.suppress(OSError):  # the terminal was closed
            self._show()

    def _say(self, markup: str) -> None:
        self._console.print(markup, highlight=False, soft_wrap=True)

    def _show(self) -> None:
        if self._loading and self._live is None and self._console.is_terminal:
            self._live = Live(
                _LoadingLine(self._loading), console=self._console, transient=True, refresh_per_second=10
            )
            self._live.start(refresh=True)
        elif not self._loading and self._live is not None:
            self._live.stop()
            self._live = None


class _LoadingLine:
    """`⠋ loading gateway 1.2 s, decode-0 1.2 s`, drawn anew ten times a second."""

    def __init__(self, since: dict[str, float]) -> None:
        self._since = since
        self._spinner = Spinner("dots")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._since:
            return  # the last drawing, before the line goes
        now = time.monotonic()
        names = ", ".join(f"{name} {now - born:.1f} s" for name, born in list(self._since.items()))
        self._spinner.update(text=f"loading {names}")
        yield self._spinner
