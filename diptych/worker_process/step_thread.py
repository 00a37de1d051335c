"""The step that a worker's engine computes now: on its own thread, abortable, and robust against bad rows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from diptych.engine.batch import AbortWords
from diptych.engine.sampling import SampleFailure
from diptych.runtime.cpu_time_slice import take_long_turns, take_short_turns
from diptych.runtime.failpoints import failpoint
from diptych.worker_process.step_watchdog import StepWatchdog

Row = TypeVar("Row")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)
Owner = TypeVar("Owner")

SLOW_STEP_S = 0.15  # what the failpoint `worker.slow_step` adds to every step


@dataclass(frozen=True, eq=False)
class InFlight(Generic[Owner]):
    """A step that was begun: the owner of each row, and the words by which rows are given up."""

    owners: Sequence[Owner]
    abort: AbortWords


class StepThread(Generic[Owner]):
    """Computes one step at a time. While it does, the blocks of each owner of a row are being written."""

    def __init__(self, *, computes: bool = True) -> None:
        """`computes`: on the thread itself, which else waits for a device, or a thread of the backend's."""
        turns = take_long_turns if computes else take_short_turns
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=turns)
        self._flights: list[InFlight[Owner]] = []
        self.clock = StepWatchdog()

    @property
    def busy(self) -> bool:
        """Whether a step is being computed."""
        return bool(self._flights)

    def writes(self, owner: Owner) -> bool:
        """Whether the blocks of `owner` are being written."""
        return any(one is owner for flight in self._flights for one in flight.owners)

    def abort(self, owner: Owner) -> None:
        """Nobody wants the row of `owner` any more: it ends within a layer, and writes until then."""
        for flight in self._flights:
            for number, one in enumerate(flight.owners):
                if one is owner:
                    flight.abort.abort(number)

    def begin(self, owners: Sequence[Owner]) -> InFlight[Owner]:
        """From now on the blocks of these are being written: a step is begun, or will be."""
        flight = InFlight(owners, AbortWords(len(owners)))
        self._flights.append(flight)
        return flight

    def end(self, flight: InFlight[Owner]) -> None:
        """The step is over."""
        self._flights.remove(flight)

    async def compute(
        self,
        owners: Sequence[Owner],
        rows: Sequence[Row],
        compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
        tokens: int | None = None,
    ) -> Sequence[Result | SampleFailure]:
        """`compute_rows` on the engine's thread; one owner a row. `tokens` in all (default: one a row).

        When this call is cancelled the thread goes on, and so the owners stay: their blocks are not free.
        """
        flight = self.begin(owners)
        results = await self.await_rows(flight, rows, compute, tokens)
        self.end(flight)
        return results

    async def await_rows(
        self,
        flight: InFlight[Owner],
        rows: Sequence[Row],
        compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
        tokens: int | None = None,
        computed: Callable[[], Awaitable[bool]] | None = None,
    ) -> Sequence[Result | SampleFailure]:
        """As `compute`, of a step that was begun and is not ended by this.

        `computed` may wait for the step on the event loop: where it gives True, `compute` has nothing to wait
        for any more and is called there.
        """
        self.clock.begin(len(rows) if tokens is None else tokens, time.monotonic())
        if failpoint("worker.slow_step"):
            await asyncio.sleep(SLOW_STEP_S)
        results = await self._results(flight, rows, compute, computed)
        self.clock.end(time.monotonic())
        return results

    async def _results(
        self,
        flight: InFlight[Owner],
        rows: Sequence[Row],
        compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
        computed: Callable[[], Awaitable[bool]] | None,
    ) -> Sequence[Result | SampleFailure]:
        work = compute_rows
        if computed is not None:
            try:
                if await computed():
                    return compute(rows, flight.abort)
            except Exception:
                _tell_failed(rows)
                work = compute_parts
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, rows, flight.abort, compute, self._again)

    def _again(self) -> None:
        """On the engine's thread: a part of the step that failed is computed."""
        self.clock.again(time.monotonic())

    def close(self) -> None:
        """Wait for the step, and make no other."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def compute_rows(
    rows: Sequence[Row],
    abort: AbortWords,
    compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
    again: Callable[[], None],
) -> Sequence[Result | SampleFailure]:
    """The results of `rows`, in order; SampleFailure for a row that raises even when it is alone.

    Computing a row twice is safe: it writes the same keys and values to the same places. Runs on the
    engine's thread; the words of `abort` go on counting for each row. `again` is called before each part of
    a step that failed.
    """
    try:
        return compute(rows, abort)
    except Exception:
        _tell_failed(rows)
    return compute_parts(rows, abort, compute, again)


def compute_parts(
    rows: Sequence[Row],
    abort: AbortWords,
    compute: Callable[[Sequence[Row], AbortWords], Sequence[Result]],
    again: Callable[[], None],
) -> Sequence[Result | SampleFailure]:
    """The results of `rows`, which failed together: each half is a step of its own, and so on. As
    `compute_rows`.

    One bad row of n costs 2 log2 n steps, and all others are in one of them. A row that failed alone gets
    another try: launched steps fail for reasons that are not the row's.
    """
    middle = len(rows) // 2
    results: list[Result | SampleFailure] = []
    for part in (slice(middle), slice(middle, None)) if middle else (slice(None),):
        some, words = list(rows[part]), AbortWords(1)
        words.words = abort.words[part]  # a view: whoever sets the step's word sets this one
        again()
        try:
            results += compute(some, words)
        except Exception as error:
            if len(some) == 1:
                results.append(SampleFailure(f"step failed: {type(error).__name__}"))
            else:
                results += compute_parts(some, words, compute, again)
    return results


def _tell_failed(rows: Sequence[Row]) -> None:
    """The exception that is being handled, in the log."""
    _log.exception("a step of %d rows failed; its halves are computed apart", len(rows))
