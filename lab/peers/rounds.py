"""Server by server, round by round: brought up or woken, warmed, measured, parked or stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from diptych.bench.backends import Unreachable
from diptych.bench.cpu_time import busy_now
from diptych.bench.request import RequestFailed
from lab.peers.cells import MACHINE, PEAK, START, Cell, Journal, Measurement
from lab.peers.environment import bf16_peak
from lab.peers.measure import Sizes, measure_cell, warm_up
from lab.peers.process import RunningServer, StartFailed
from lab.peers.progress import Progress
from lab.peers.servers import Server

# After a wake-up the kernel moves the threads back; before a pause the server ends the step that it is in and
# the requests that were left. One that is stopped in the middle of a step finds it overdue when it goes on.
_SETTLE_S = 1.5


class Rounds:
    """Measures every missing cell of a journal. `faults` are the servers that had to be left out, and why."""

    def __init__(self, servers: Sequence[Server], journal: Journal, sizes: Sizes, logs: Path) -> None:
        self._servers, self._journal, self._sizes, self._logs = servers, journal, sizes, logs
        self._parked: dict[str, RunningServer] = {}
        self.faults: dict[str, str] = {}

    def run(self, cells: Sequence[Cell], tell: Callable[[str], None]) -> None:
        """Run all rounds. A server that fails is left out from there on; the others go on."""
        missing = self._journal.missing(cells)
        with ExitStack() as stack:
            self._start_parked(missing, stack, tell)
            progress = Progress(len(missing), tell)
            for number in sorted({cell.round for cell in missing}):
                self._journal.add(Measurement(Cell(number, MACHINE, PEAK), {"bf16_flops": bf16_peak()}))
                for server in self._servers:
                    turn = [cell for cell in missing if (cell.round, cell.server) == (number, server.name)]
                    if turn and server.name not in self.faults:
                        self._turn(server, turn, progress)

    def _start_parked(self, missing: Sequence[Cell], stack: ExitStack, tell: Callable[[str], None]) -> None:
        for server in self._servers:
            if server.parks and any(cell.server == server.name for cell in missing):
                tell(f"starting {server.name} (a minute or two)")
                try:
                    running = stack.enter_context(RunningServer(server, self._logs))
                    warm_up(running, self._sizes)
                except (StartFailed, RequestFailed, Unreachable) as error:
                    self._fault(server, error, tell)
                    continue
                self._note_start(running, 0)
                time.sleep(_SETTLE_S)
                running.park()
                self._parked[server.name] = running

    def _turn(self, server: Server, cells: Sequence[Cell], progress: Progress) -> None:
        others = busy_now()
        try:
            with self._up(server, cells[0].round) as running:
                warm_up(running, self._sizes)
                time.sleep(self._sizes.rest_s)
                for cell in cells:
                    measured = measure_cell(running, cell, self._sizes)
                    figures = {**measured.figures, "busy_before_share": others}
                    self._journal.add(Measurement(cell, figures))
                    progress.measured(cell, figures)
        except (StartFailed, RequestFailed, Unreachable) as error:
            self._fault(server, error, progress.tell)

    @contextmanager
    def _up(self, server: Server, number: int) -> Iterator[RunningServer]:
        running = self._parked.get(server.name)
        if running is None:
            with RunningServer(server, self._logs) as started:
                self._note_start(started, number)
                yield started
            return
        running.wake()
        time.sleep(_SETTLE_S)
        try:
            yield running
        finally:
            time.sleep(_SETTLE_S)
            running.park()

    def _note_start(self, running: RunningServer, number: int) -> None:
        self._journal.add(Measurement(Cell(number, running.server.name, START), {"start_s": running.start_s}))

    def _fault(self, server: Server, error: Exception, tell: Callable[[str], None]) -> None:
        self.faults[server.name] = str(error)
        tell(f"LEFT OUT: {server.name}: {error}")
